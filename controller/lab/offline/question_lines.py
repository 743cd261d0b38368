"""One record of a question file, and what its readers take out of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LABELS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Of choices that the file gives none."""

BROKEN: Final = "\0broken"
"""Stands for the fields of a line that has none that can be read."""


class BadLine(ValueError):
    """One line is wrong; the text says how."""


@dataclass(frozen=True, slots=True)
class Line:
    """One record of a file: its line number, and its fields."""

    number: int
    fields: Mapping[str, Any]


def field_of(line: Line, name: str) -> Any:
    """A field's value.

    Raises:
        BadLine: the line cannot be read, or has no such field.
    """
    if BROKEN in line.fields:
        raise BadLine(str(line.fields[BROKEN]))
    if name not in line.fields:
        raise BadLine(f"{name!r} is missing")
    return line.fields[name]


def text_of(line: Line, name: str) -> str:
    """A field that is a text.

    Raises:
        BadLine: it is missing, empty or no text.
    """
    found = field_of(line, name)
    if not isinstance(found, str) or not found.strip():
        raise BadLine(f"{name!r} must be a text that is not empty")
    return found


def stem_of(path: Path) -> str:
    """A file's name without .gz and its kind."""
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem
