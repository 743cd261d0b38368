"""docs/profiling-data.md names what there is."""

from pathlib import Path

import pytest

from controller.lab.offline.graders import Grader
from controller.lab.offline.measurements import COLUMNS, SCHEMA_VERSION
from controller.lab.offline.workloads import FORMATS

PAGE = Path(__file__).parents[5] / "docs" / "profiling-data.md"


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_column_is_described_with_its_type(column: object) -> None:
    (found,) = [c for c in COLUMNS if c is column]
    unknown = " or unknown" if found.is_optional else ""
    assert f"| `{found.name}` | {found.type.__name__}{unknown} | " in PAGE.read_text()


def test_formats_graders_and_version_are_described() -> None:
    page = PAGE.read_text()
    assert f"Schema version {SCHEMA_VERSION}." in page
    for name in (*FORMATS, *(grader.value for grader in Grader)):
        assert f"`{name}`" in page
