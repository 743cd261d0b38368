"""Profiling data goes to a file and comes back the same, and a bad file is told apart."""

import csv
import dataclasses
import gzip
from pathlib import Path
from typing import Any

import pytest

from controller.lab.offline import measurements
from controller.lab.offline.measurements import (
    COLUMNS,
    Measurement,
    MeasurementFormat,
    MeasurementsError,
    read_measurements,
    write_measurements,
)
from tests.unit.controller.lab.offline.rows import measurement

UNKNOWN = {column.name: None for column in COLUMNS if column.is_optional}


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_rows_come_back_as_they_were(tmp_path: Path, format: MeasurementFormat) -> None:
    rows = [
        measurement(prompt='Two\r\nlines, "quoted", and a comma; ünïcode 🦊', energy_joules=1 / 3),
        measurement(**UNKNOWN, answer="", cost_usd=1e-12, memory_bytes=2**40),
        measurement(answer="x" * 300_000, is_throttled=False, model_is_base=False),
    ]
    path = tmp_path / f"measurements.{format}"
    assert write_measurements(path, rows, format) == 3
    assert read_measurements(path) == rows
    assert read_measurements(tmp_path) == rows
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_field_limit_of_the_csv_module_is_left_as_it_was(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    write_measurements(tmp_path / "a.csv", [measurement()], "csv")
    read_measurements(tmp_path / "a.csv")
    assert csv.field_size_limit() == before


def test_compressed_csv_is_read(tmp_path: Path) -> None:
    write_measurements(tmp_path / "a.csv", [measurement()], "csv")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    assert read_measurements(tmp_path / "a.csv.gz") == [measurement()]


def test_columns_that_a_later_version_adds_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write_measurements(path, [measurement()], "csv")
    header, line = path.read_text().splitlines()
    path.write_text(f"{header},later\n{line},7\n")
    assert read_measurements(path) == [measurement()]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("\n1,", "\n2,"), "line 2: schema version 2 is newer"),
        (lambda text: text.replace("schema_version,", "other,"), "no schema_version"),
        (lambda text: text.replace("cpu_cores", "cores"), "column cpu_cores is missing"),
        (lambda text: text.replace(",3,", ",three,", 1), "'three', which is no int"),
        (lambda text: text.replace(",true,", ",yes,", 1), "'yes', not true or false"),
        (lambda text: text.replace(",0.1,", ",,", 1), "is empty"),
        (lambda text: text.replace(",0.1,", ",nan,", 1), "not finite"),
        (lambda text: text[:-20], "is the file cut off"),
        (lambda text: "", "empty"),
    ],
)
def test_bad_csv_says_where_it_is_bad(tmp_path: Path, change: Any, told: str) -> None:
    path = tmp_path / "a.csv"
    write_measurements(path, [measurement()], "csv")
    path.write_text(change(path.read_text()))
    with pytest.raises(MeasurementsError, match=r"a\.csv") as caught:
        read_measurements(path)
    assert told in str(caught.value)


@pytest.mark.parametrize("content", [None, b"PAR1 and nothing more"])
def test_bad_parquet_is_told(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(MeasurementsError, match=r"a\.parquet"):
        read_measurements(tmp_path / "a.parquet")


def test_missing_files_and_other_formats_are_told(tmp_path: Path) -> None:
    with pytest.raises(MeasurementsError, match="profile export"):
        read_measurements(tmp_path)
    with pytest.raises(MeasurementsError, match="No such file"):
        read_measurements(tmp_path / "a.csv")
    (tmp_path / "a.txt").touch()
    with pytest.raises(MeasurementsError, match=r"not a \.parquet"):
        read_measurements(tmp_path / "a.txt")


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(measurements.importlib, "import_module", absent)  # type: ignore[attr-defined]
    with pytest.raises(MeasurementsError, match=r"pointsman\[profile\]"):
        write_measurements(tmp_path / "a.parquet", [measurement()], "parquet")
    assert list(tmp_path.iterdir()) == []


def test_every_column_is_documented() -> None:
    text = Measurement.__doc__ or ""
    for field in dataclasses.fields(Measurement):
        assert f"\n        {field.name}: " in text
