"""The database file: locked, opened, checked, brought up to date, and its errors in words."""

import os
import sqlite3
from pathlib import Path
from typing import IO, Final

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from controller.storage.base import StorageError
from controller.storage.folder_lock import lock_file
from controller.storage.schema import REVISION

FILE_NAME: Final = "controller.db"

_BUSY_MILLISECONDS: Final = 5_000

_CHECK_UP_TO_BYTES: Final = 64 << 20
"""A file of up to this size is checked whole at every start, in well under a second."""

_LEAST_FREE_BYTES: Final = 256 << 10
"""With less than this a failing write is taken to fail for want of space."""


def open_database(path: Path) -> Engine:
    """The database, made or brought up to this version.

    Raises:
        StorageError: it is damaged, newer than this code, or cannot be written.
    """
    engine = create_engine(
        f"sqlite:///{path}",
        poolclass=NullPool,  # a connection is cheap, and belongs to one thread
        connect_args={"timeout": _BUSY_MILLISECONDS / 1e3},
    )
    event.listen(engine, "connect", _configure)
    try:
        with engine.connect() as connection:
            if path.stat().st_size <= _CHECK_UP_TO_BYTES:
                complaint = connection.execute(text("PRAGMA quick_check(1)")).scalar()
                if complaint != "ok":
                    raise _damaged(path, str(complaint))
            _migrate(connection, path)
            # A file that cannot be written is told now, not when the first value comes.
            connection.execute(text("PRAGMA user_version = 1"))
            connection.commit()
    except DBAPIError as error:
        raise StorageError(explained(path, error)) from error
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error
    return engine


def _configure(connection: sqlite3.Connection, _record: object) -> None:
    cursor = connection.cursor()
    # Before the first table, or it has no effect.
    cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
    cursor.execute("PRAGMA journal_mode = WAL")
    # With WAL this loses at most the last commits when the power fails, never the file.
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
    cursor.close()


def _migrate(connection: Connection, path: Path) -> None:
    found = connection.execute(
        text("SELECT name FROM sqlite_master WHERE name = 'alembic_version'")
    ).scalar()
    revision = None
    if found is not None:
        revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    if revision == REVISION:
        return
    # Imported here, since it takes a third of a second and is needed once.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    if revision is not None:
        try:
            ScriptDirectory.from_config(config).get_revision(revision)
        except CommandError as error:
            raise StorageError(
                f"{path} was written by a newer version of Pointsman (schema {revision}, this one "
                f"knows {REVISION}); update the controller, or name another data-dir"
            ) from error
    command.upgrade(config, REVISION)
    connection.commit()


def locked(folder: Path) -> IO[bytes]:
    """A file that is locked until it is closed: one controller at a time has the folder.

    Raises:
        StorageError: another one has it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock_file(folder / "controller.lock")
    except BlockingIOError:
        raise StorageError(
            f"{folder} is in use by another controller; stop it, or name another data-dir"
        ) from None
    except OSError as error:
        raise StorageError(
            f"{folder}: {error.strerror or error}; make it writable for the controller's user, or "
            "name another data-dir"
        ) from error


def _damaged(path: Path, complaint: str) -> StorageError:
    return StorageError(
        f"{path} is damaged ({complaint}); run `edge-controller storage repair`, which sets it "
        "aside and takes over what can still be read"
    )


def explained(path: Path, error: DBAPIError) -> str:
    """What went wrong with the database, and what to do."""
    code = getattr(error.orig, "sqlite_errorname", "")
    words = str(error.orig)
    if code.startswith("SQLITE_FULL") or "disk is full" in words or _is_full(path):
        # A full disk is an I/O error where it is the write-ahead log's index that cannot grow.
        return f"disk_full: {path} cannot grow; free space there"
    if code.startswith("SQLITE_READONLY") or "readonly" in words:
        return f"{path} is read-only; make it writable for the controller's user"
    if code.startswith("SQLITE_CANTOPEN") or "unable to open" in words:
        return f"{path} cannot be opened; look at the permissions of its folder"
    if code.startswith("SQLITE_BUSY") or "locked" in words:
        return f"{path} is locked by another program; end it"
    if code.startswith("SQLITE_IOERR"):
        return f"{path}: the disk fails ({words}); look at it, and at the free space"
    if isinstance(error, OperationalError) and not code.startswith("SQLITE_CORRUPT"):
        return f"{path}: {words}"
    return str(_damaged(path, words)) if isinstance(error, DatabaseError) else f"{path}: {words}"


def _is_full(path: Path) -> bool:
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _LEAST_FREE_BYTES
