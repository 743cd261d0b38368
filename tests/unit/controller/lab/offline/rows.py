"""Rows of profiling data for tests."""

from typing import Any

from controller.lab.offline.measurements import COLUMNS, Measurement


def measurement(**changes: Any) -> Measurement:
    """A row in which every optional column is known."""
    by_type = {str: "text", int: 3, float: 0.1, bool: True}
    values: dict[str, Any] = {column.name: by_type[column.type] for column in COLUMNS}
    return Measurement(**{**values, **changes})
