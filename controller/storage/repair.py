"""Looking after a database while no controller runs: check, repair, export."""

import csv
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TextIO

from sqlalchemy import Table, select
from sqlalchemy.dialects.sqlite import insert

from controller.storage.base import FinishedRow, StorageError
from controller.storage.schema import CALIBRATIONS, CHOICES, NODES, REQUESTS
from controller.storage.sqlite_file import FILE_NAME, locked, open_database

_TABLES: Final = (NODES, CALIBRATIONS, REQUESTS, CHOICES)


@dataclass(frozen=True, slots=True)
class StorageCheck:
    """What was found in a database.

    Attributes:
        problems: in SQLite's words; empty when it is whole.
    """

    path: Path
    bytes: int
    nodes: int
    calibrations: int
    requests: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repair:
    """What became of a damaged database.

    Attributes:
        set_aside: where the damaged file is now.
        rows: of each table, how many were taken over.
    """

    set_aside: Path
    rows: dict[str, int]


def check_storage(data_dir: Path) -> StorageCheck:
    """Check the whole file and count what is in it; changes nothing.

    Raises:
        StorageError: there is none, or a controller has it open.
    """
    path = _existing(data_dir)
    with closing(locked(data_dir)), closing(_read_only(path)) as connection:
        try:
            found = [row[0] for row in connection.execute("PRAGMA integrity_check(100)")]
            problems = tuple(line for line in found if line != "ok")
            counts = [_count(connection, table.name) for table in _TABLES]
        except sqlite3.DatabaseError as error:
            problems, counts = (str(error),), [0, 0, 0]
    return StorageCheck(path, path.stat().st_size, counts[0], counts[1], counts[2], problems)


def repair_storage(data_dir: Path) -> Repair:
    """Set the file aside, make a new one and take over every row that can still be read.

    Raises:
        StorageError: there is none, a controller has it open, or the new one cannot be written.
    """
    path = _existing(data_dir)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    with closing(locked(data_dir)):
        path.rename(aside)
        for suffix in ("-wal", "-shm"):
            beside = path.with_name(path.name + suffix)
            if beside.exists():
                beside.rename(aside.with_name(aside.name + suffix))
        engine = open_database(path)
        rows: dict[str, int] = {}
        try:
            with closing(_read_only(aside)) as old, engine.begin() as new:
                for table in _TABLES:
                    readable = _readable(old, table)
                    if readable:
                        new.execute(insert(table).prefix_with("OR REPLACE"), readable)
                    rows[table.name] = len(readable)
        finally:
            engine.dispose()
    return Repair(aside, rows)


def export_requests(data_dir: Path, out: TextIO) -> int:
    """Write all finished requests as CSV, oldest first; returns how many.

    A running controller does not mind.

    Raises:
        StorageError: there is no database, or it cannot be read.
    """
    path = _existing(data_dir)
    names = [field.name for field in fields(FinishedRow)]
    statement = select(*(REQUESTS.c[name] for name in names)).order_by(REQUESTS.c.number)
    writer = csv.writer(out)
    writer.writerow(names)
    count = 0
    with closing(_read_only(path)) as connection:
        try:
            for row in connection.execute(str(statement.compile())):
                writer.writerow(row)
                count += 1
        except sqlite3.DatabaseError as error:
            raise StorageError(
                f"{path}: {error} after {count} requests; `edge-controller storage check` says more"
            ) from error
    return count


def _existing(data_dir: Path) -> Path:
    path = data_dir / FILE_NAME
    if not path.exists():
        raise StorageError(
            f"{path} does not exist; name the data_dir of the controller with --data-dir"
        )
    return path


def _read_only(path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
    except sqlite3.Error as error:
        raise StorageError(f"{path}: {error}") from error


def _count(connection: sqlite3.Connection, table: str) -> int:
    known = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
    if not connection.execute(known, (table,)).fetchone()[0]:
        return 0
    count: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return count


def _readable(connection: sqlite3.Connection, table: Table) -> list[dict[str, Any]]:
    """Every row that can be read: in one pass, and where that fails row by row."""
    names = [column.name for column in table.columns]
    columns = ", ".join(names)
    rows: dict[int, dict[str, Any]] = {}
    for direction in ("ASC", "DESC"):  # what lies beyond a damaged page is reached from behind
        try:
            for row in connection.execute(
                f"SELECT rowid, {columns} FROM {table.name} ORDER BY rowid {direction}"
            ):
                rows[row[0]] = dict(zip(names, row[1:], strict=True))
        except sqlite3.DatabaseError:
            continue
        break
    return [rows[key] for key in sorted(rows) if _is_whole(table, rows[key])]


def _is_whole(table: Table, row: dict[str, Any]) -> bool:
    return all(row[c.name] is not None for c in table.columns if not c.nullable)
