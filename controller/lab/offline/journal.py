"""The journal of a profiling run: what was measured, kept line by line through any crash.

A folder has `run.json`, which says what the run is of, and `journal.jsonl`, one JSON object a line:
a measurement or a failure. A line is on disk before the next question is counted as answered. A
last line that a crash cut off is taken away when the journal is opened again; its question is
simply asked again.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from controller.lab.offline.measurements import (
    SCHEMA_VERSION,
    Measurement,
    MeasurementsError,
    measurement_as_dict,
    measurement_from_dict,
)

_JOURNAL: Final = "journal.jsonl"
_RUN: Final = "run.json"


class JournalError(Exception):
    """A journal cannot be opened, read or written; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is of; a run goes on only with an equal plan.

    Attributes:
        run_id: of the run.
        workloads: "name format sha256" of each file, in order.
        questions: digest of all questions that were chosen, in order.
        max_tokens: greatest length of an answer whose question gives none.
        seed: of the sampling.
    """

    run_id: str
    workloads: tuple[str, ...]
    questions: str
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A question that a destination did not answer.

    Attributes:
        attempts: how often it was asked.
        error: why not, in words.
        failed_time: Unix seconds.
    """

    kind: str
    workload: str
    question_id: str
    node_id: str
    model: str
    attempts: int
    error: str
    failed_time: float


Entry = Measurement | Failure


class Journal:
    """An open journal; one process at a time.

    Args:
        folder: made if it is not there.
        plan: what this run is of.
        resume: whether a run that is there already is to go on.

    Raises:
        JournalError: there is a run already, or none to go on with, or it is of something else; it
            is damaged, in use, or cannot be written.
    """

    def __init__(self, folder: Path, plan: Plan, resume: bool) -> None:
        self.folder = folder
        self._size = 0
        self._file: FileIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / _JOURNAL).open("ab", buffering=0)
            self._lock(self._file)
            self.plan = self._agree(plan, resume)
            self.repaired_bytes = self._repair(self._file)
        except OSError as error:
            self.close()
            raise JournalError(f"{folder}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def append(self, entry: Entry) -> None:
        """Keep an entry; it is on disk when this returns.

        Raises:
            JournalError: it cannot be written; nothing of it is left in the file.
        """
        if self._file is None:
            raise JournalError(f"{self.folder}: the journal is closed")
        if isinstance(entry, Measurement):
            record = {"type": "measurement", **measurement_as_dict(entry)}
        else:
            record = {"type": "failure", **asdict(entry)}
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            remaining = memoryview(line)
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._rewind()
            raise JournalError(
                f"{self.folder / _JOURNAL}: {error.strerror or error}; what was measured so far "
                "is kept: mend it and go on with --resume"
            ) from error
        self._size += len(line)

    def close(self) -> None:
        """Close the file; repeats change nothing."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _rewind(self) -> None:
        """Take a line away that was written in part; what cannot be is repaired when reopened."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._size)
        self.close()

    def _lock(self, file: FileIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalError(f"{self.folder}: another profiling run is writing here") from error

    def _agree(self, plan: Plan, resume: bool) -> Plan:
        path = self.folder / _RUN
        if not path.exists():
            if (self.folder / _JOURNAL).stat().st_size:
                raise JournalError(f"{path} is missing beside its journal; restore it")
            _write_atomically(path, {"schema_version": SCHEMA_VERSION, **asdict(plan)})
            return plan
        if not resume:
            raise JournalError(
                f"{self.folder} has a profiling run already; go on with it by --resume, or name "
                "another folder with --out"
            )
        before = read_plan(self.folder)
        for name in ("workloads", "questions", "max_tokens", "seed"):
            if getattr(before, name) != getattr(plan, name):
                raise JournalError(
                    f"{self.folder} is a run with other {name.replace('_', ' ')}: repeat its "
                    "options to go on with it, or name another folder with --out"
                )
        return before

    def _repair(self, file: FileIO) -> int:
        """Take away a last line that a crash cut off; how many bytes that were."""
        good = 0
        with (self.folder / _JOURNAL).open("rb") as written:
            for line in written:
                if not line.endswith(b"\n"):
                    break
                good += len(line)
        cut = os.fstat(file.fileno()).st_size - good
        if cut:
            os.ftruncate(file.fileno(), good)
            os.fsync(file.fileno())
        self._size = good
        return cut


def read_plan(folder: Path) -> Plan:
    """What a folder's run is of.

    Raises:
        JournalError: there is no run, or its description is damaged.
    """
    path = folder / _RUN
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = found.pop("schema_version")
        found["workloads"] = tuple(found["workloads"])
        plan = Plan(**found)
    except FileNotFoundError as error:
        raise JournalError(f"{folder}: no profiling run; make one with `profile --out`") from error
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise JournalError(f"{path}: damaged ({error!r})") from error
    if version > SCHEMA_VERSION:
        raise JournalError(f"{path}: of a newer version of Pointsman; update this one")
    return plan


def read_journal(folder: Path) -> Iterator[Entry]:
    """Everything in a folder's journal, in order; a last line that is cut off is left out.

    Raises:
        JournalError: there is no journal, or a line in the midst of it is damaged.
    """
    path = folder / _JOURNAL
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                yield _entry(line, f"{path}, line {number}")
    except FileNotFoundError as error:
        raise JournalError(f"{folder}: no profiling run; make one with `profile --out`") from error
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}") from error


def _entry(line: bytes, where: str) -> Entry:
    try:
        record = json.loads(line)
        match record.pop("type"):
            case "measurement":
                return measurement_from_dict(record)
            case "failure":
                return Failure(**record)
    except (ValueError, TypeError, KeyError, AttributeError, MeasurementsError) as error:
        raise JournalError(
            f"{where}: damaged ({error}); take this line away and go on with --resume, which "
            "asks its question again"
        ) from error
    raise JournalError(f"{where}: neither a measurement nor a failure; update Pointsman")


def _write_atomically(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
