"""A quality store in a folder: whole generations, with a journal of what came since.

    folder/
      store.json               schema version, dimension and name of the embedding model
      CURRENT                  name of the generation in force, replaced atomically
      generation-000003/       manifest.json with checksums, one .npy file an array, and the
                               search index where it takes long to build
      journal-000003.bin       records since, each frame with its length and checksum

`QualityFolder.append` is on disk when it returns; `compact` writes a new generation beside the old
one and only then names it, so a crash at any moment loses nothing that was acknowledged. A search
index that is damaged, or out of step with the records, is left alone and built again from them.
"""

import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from controller.quality.journal import frame, read_journal
from controller.quality.neighbour_index import FLAT_UP_TO, GraphIndex
from controller.quality.store import (
    EMBEDDING_DIMENSION,
    QualityRecord,
    QualityStore,
)
from controller.quality.store_contents import InvalidRecordError, StoreContents
from controller.storage.digests import file_digest
from controller.storage.folder_lock import lock_file

log = structlog.get_logger()

SCHEMA_VERSION: Final = 1

_TIMES: Final = "seen_times"
"""An array that generations of before lack; what they hold counts as seen when it is read."""

_ARRAYS: Final = ("digests", "embeddings", "scores", "score_counts", "tokens", "token_counts")


class QualityFilesError(Exception):
    """The folder cannot be read or written; its text says what to do."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was found at the opening.

    Attributes:
        prompts: in the store.
        journal_records: taken in from the journal.
        lost_tail_bytes: at the journal's end, of a write that a crash cut short; its caller was
            never told that it had succeeded.
        set_aside: a copy of a journal that is damaged before its end; None when it is not.
    """

    prompts: int
    journal_records: int
    lost_tail_bytes: int
    set_aside: Path | None


class QualityFolder:
    """A quality store and the folder that keeps it; one process at a time.

    Attributes:
        store: to be read by anyone; what is added goes through `append`, or is not kept.
        report: what was found at the opening.

    Args:
        folder: made when absent.
        dimension: of the embeddings.
        flat_up_to: as in `QualityStore`.
        embedding_model: whose embeddings these are; those of another model do not compare. None
            takes what is there.

    Raises:
        QualityFilesError: the folder is of another version, damaged, in use or not writable.
    """

    def __init__(
        self,
        folder: Path,
        dimension: int = EMBEDDING_DIMENSION,
        flat_up_to: int = FLAT_UP_TO,
        embedding_model: str | None = None,
    ) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._has_failed = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = _locked(folder / "lock")
            try:
                _agree(folder / "store.json", dimension, embedding_model)
                self._open(dimension, flat_up_to)
            except BaseException:
                self._lock_file.close()
                raise
        except OSError as error:
            raise QualityFilesError(_explained(folder, error)) from error

    def _open(self, dimension: int, flat_up_to: int) -> None:
        self._generation = _current(self._folder)
        contents = _read_generation(self._folder, self._generation)
        if contents is None:
            self.store = QualityStore(dimension, flat_up_to)
        else:
            try:
                index = _read_index(self._folder / _name(self._generation))
                self.store = QualityStore.from_contents(contents, flat_up_to, index)
            except InvalidRecordError as error:
                raise QualityFilesError(
                    f"{self._folder} holds what no quality store has written: {error}; "
                    "restore a copy of the folder or move it away"
                ) from error
        journal = self._journal_path(self._generation)
        if contents is not None and not journal.exists():
            raise QualityFilesError(
                f"{journal} is missing, and with it what came since {_name(self._generation)}; "
                "restore it, or make an empty file of this name to go on without"
            )
        found = read_journal(journal)
        set_aside = None
        if found.is_damaged:
            set_aside = _unused(journal.with_suffix(".damaged"))
            shutil.copyfile(journal, set_aside)
        taken = 0
        for record, seen_time in found.records:
            try:
                self.store.add([record], seen_time)
            except InvalidRecordError as error:
                raise QualityFilesError(
                    f"{journal} holds a record that cannot be stored: {error}; "
                    "it was written with other settings: move it away"
                ) from error
            taken += 1
        self._journal = journal.open("r+b" if journal.exists() else "w+b")
        self._journal.truncate(found.good_bytes)
        self._journal.seek(found.good_bytes)
        self._journal_records = taken
        _remove_other_generations(self._folder, self._generation)
        self.report = LoadReport(
            prompts=len(self.store),
            journal_records=taken,
            lost_tail_bytes=found.cut_bytes,
            set_aside=set_aside,
        )
        if set_aside is not None:
            log.error(
                "quality.journal_damaged",
                kept_records=taken,
                set_aside=str(set_aside),
                hint="what lies behind the damage is in that copy only",
            )
        elif found.cut_bytes:
            log.warning("quality.write_truncated", bytes=found.cut_bytes, kept_records=taken)

    def __enter__(self) -> "QualityFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def journal_records(self) -> int:
        """Records since the generation was written; `compact` makes it 0."""
        return self._journal_records

    def append(self, records: Sequence[QualityRecord], seen_time: float | None = None) -> None:
        """Keep records: on disk first, then in the store; all or none.

        Blocks for a disk flush: not for the event loop.

        Args:
            records: what was observed.
            seen_time: when, seconds since 1970; None: now.

        Raises:
            InvalidRecordError: a record cannot be stored; nothing was kept.
            QualityFilesError: the disk is full or the folder cannot be written; nothing was kept.
        """
        now = time.time() if seen_time is None else seen_time
        with self._lock:
            frames = b"".join(frame(record, now) for record in self._checked(records))
            self._require_journal()
            start = self._journal.tell()
            try:
                self._journal.write(frames)
                self._journal.flush()
                os.fsync(self._journal.fileno())
            except OSError as error:
                self._rewind(start)
                raise QualityFilesError(_explained(self._folder, error)) from error
            self.store.add(records, now)
            self._journal_records += len(records)

    def compact(self) -> None:
        """Write everything as a new generation and begin an empty journal.

        Takes as long as writing the embeddings does; `append` waits meanwhile.

        Raises:
            QualityFilesError: the disk is full or the folder cannot be written; all is as before.
        """
        with self._lock:
            following = self._generation + 1
            try:
                _write_generation(self._folder, following, self.store)
                fresh = self._journal_path(following).open("w+b")
                _flush_folder(self._folder)
                _write_atomically(self._folder / "CURRENT", f"{_name(following)}\n".encode())
            except OSError as error:
                shutil.rmtree(self._folder / _name(following), ignore_errors=True)
                raise QualityFilesError(_explained(self._folder, error)) from error
            self._journal.close()
            self._journal, self._generation = fresh, following
            self._journal_records, self._has_failed = 0, False
            _remove_other_generations(self._folder, following)

    def close(self) -> None:
        """Let the folder go; nothing is written."""
        self._journal.close()
        self._lock_file.close()

    def _checked(self, records: Sequence[QualityRecord]) -> Sequence[QualityRecord]:
        models: dict[str, str] = {}
        for record in records:
            self.store.check(record)
            if models.setdefault(record.destination, record.model) != record.model:
                raise InvalidRecordError(f"these records give {record.destination!r} two models")
        return records

    def _require_journal(self) -> None:
        if self._has_failed:
            raise QualityFilesError(
                f"{self._folder} could not be written and the journal could not be set back; "
                "free space and compact, or start again"
            )

    def _rewind(self, start: int) -> None:
        # Half a frame at the end would hide every record behind it from the next start.
        with suppress(OSError):  # what is still buffered is cut off below
            self._journal.close()
        try:
            self._journal = self._journal_path(self._generation).open("r+b")
            self._journal.truncate(start)
            self._journal.seek(start)
        except OSError:
            self._has_failed = True

    def _journal_path(self, generation: int) -> Path:
        return self._folder / f"journal-{generation:06d}.bin"


def _name(generation: int) -> str:
    return f"generation-{generation:06d}"


def _agree(path: Path, dimension: int, embedding_model: str | None) -> None:
    """Write down whose embeddings a new folder keeps; check it for one that is there."""
    wanted = {
        "schema_version": SCHEMA_VERSION,
        "dimension": dimension,
        "embedding_model": embedding_model,
    }
    if not path.exists():
        _write_atomically(path, json.dumps(wanted).encode())
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version, model = found["schema_version"], found["embedding_model"]
        is_same_size = found["dimension"] == dimension
    except (ValueError, TypeError, KeyError) as error:
        raise QualityFilesError(
            f"{path} is damaged; restore a copy of {path.parent}, or write "
            f"{json.dumps(wanted)} into it if that is what it held"
        ) from error
    if version != SCHEMA_VERSION:
        raise QualityFilesError(
            f"{path.parent} has schema version {version}; this controller reads {SCHEMA_VERSION}"
        )
    is_same_model = embedding_model is None or model is None or model == embedding_model
    if not (is_same_size and is_same_model):
        raise QualityFilesError(
            f"{path.parent} was filled with another embedding model ({model or 'unnamed'}, "
            f"{found['dimension']} numbers); name another folder, or use that model"
        )


def _current(folder: Path) -> int:
    """The generation in force; 0 before the first."""
    path = folder / "CURRENT"
    if not path.exists():
        if any(folder.glob("generation-*/manifest.json")):
            raise QualityFilesError(
                f"{folder} has generations but no CURRENT file; write the name of the newest whole "
                "one into it, such as `generation-000003`"
            )
        return 0
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    number = text.removeprefix("generation-")
    if not number.isdecimal():
        raise QualityFilesError(f"{path} names no generation: {text[:80]!r}; restore the folder")
    return int(number)


def _read_generation(folder: Path, generation: int) -> StoreContents | None:
    if generation == 0:
        return None
    path = folder / _name(generation)
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        version = manifest["schema_version"]
        if version != SCHEMA_VERSION:
            raise QualityFilesError(
                f"{path} has schema version {version}; this controller reads {SCHEMA_VERSION}"
            )
        arrays: dict[str, NDArray[Any]] = {}
        has_times = _TIMES in manifest["sha256"]
        for name in (*_ARRAYS, _TIMES) if has_times else _ARRAYS:
            file = path / f"{name}.npy"
            if file_digest(file) != manifest["sha256"][name]:
                raise QualityFilesError(f"{file} is damaged; restore a copy of {folder}")
            arrays[name] = np.load(file, allow_pickle=False)
        arrays.setdefault(_TIMES, np.full(len(arrays["digests"]), time.time()))
        return StoreContents(
            destinations=tuple(manifest["destinations"]),
            models=tuple(manifest["models"]),
            **arrays,
        )
    except (KeyError, TypeError, ValueError, FileNotFoundError) as error:
        raise QualityFilesError(
            f"{path} cannot be read ({error}); restore a copy of {folder}"
        ) from error


def _read_index(path: Path) -> GraphIndex | None:
    """The index beside a generation; None when there is none that can be trusted."""
    try:
        sums = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["index_sha256"]
        if not sums or any(file_digest(path / name) != wanted for name, wanted in sums.items()):
            return None
        return GraphIndex.load(path)
    except (OSError, ValueError, KeyError):
        return None  # it is built again


def _write_generation(folder: Path, generation: int, store: QualityStore) -> None:
    contents = store.contents()
    path = folder / _name(generation)
    shutil.rmtree(path, ignore_errors=True)  # of an attempt that failed
    path.mkdir()
    sums: dict[str, str] = {}
    for name in (*_ARRAYS, _TIMES):
        file = path / f"{name}.npy"
        with file.open("wb") as opened:
            np.save(opened, getattr(contents, name), allow_pickle=False)
            opened.flush()
            os.fsync(opened.fileno())
        sums[name] = file_digest(file)
    index_files = store.save_index(path)
    for name in index_files:
        with (path / name).open("rb") as written:
            os.fsync(written.fileno())
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "prompts": len(contents.digests),
        "destinations": list(contents.destinations),
        "models": list(contents.models),
        "sha256": sums,
        "index_sha256": {name: file_digest(path / name) for name in index_files},
    }
    _write_atomically(path / "manifest.json", json.dumps(manifest, indent=1).encode())


def _remove_other_generations(folder: Path, kept: int) -> None:
    for path in folder.glob("generation-*"):
        if path.name != _name(kept):
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("journal-*.bin"):
        if path.name != f"journal-{kept:06d}.bin":
            with suppress(OSError):  # removed at the next start
                path.unlink()


def _locked(path: Path) -> IO[bytes]:
    try:
        return lock_file(path)
    except BlockingIOError:
        raise QualityFilesError(
            f"{path.parent} is in use by another process; stop it or name another folder"
        ) from None


def _unused(path: Path) -> Path:
    """The path, or the first with a number behind it, that nothing has yet."""
    paths = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain((path,), paths) if not one.exists())


def _write_atomically(path: Path, text: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(folder: Path, error: OSError) -> str:
    return (
        f"the quality store in {folder} cannot be read or written: {error.strerror or error}; "
        "free space there, mend its permissions, or name another folder"
    )
