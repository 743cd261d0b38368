"""One holder at a time for a model's files, known by name and proven alive.

The operating system holds the lock (flock through `filelock`), so it ends with its holder, however
that died: a crash leaves nothing to clear away. Beside it lies a record of the holder, touched
every few seconds, from which others read whom they wait for and whether it still moves.
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import filelock

from edge_agent.errors import ModelError

_POLL_SECONDS: Final = 0.25
_BEAT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Who holds a lock."""

    process_id: int
    host: str

    def describe(self) -> str:
        """Return the holder in words."""
        return f"process {self.process_id} on {self.host}"


@dataclass(frozen=True, slots=True)
class LockLimits:
    """How long others wait for a holder.

    Attributes:
        wait_seconds: for a holder that is alive.
        stale_seconds: for one whose record has not been touched; several times the 5 s between
            touches.
    """

    wait_seconds: float = 3600.0
    stale_seconds: float = 60.0


@asynccontextmanager
async def held(
    path: Path,
    what: str,
    limits: LockLimits,
    on_wait: Callable[[str], None],
) -> AsyncIterator[None]:
    """Hold the lock at `path` for the length of the block; wait for another holder first.

    Args:
        path: the lock file; made when absent, and its folder must be there.
        what: what the lock is for, such as "the pull of smollm2"; used in texts.
        on_wait: called once with the holder in words, when there is something to wait for.

    Raises:
        ModelError: the holder shows no life, or waiting took too long, or the folder's file system
            has no locks or cannot be written.
    """
    lock = _lock(path)
    begun = moved = time.monotonic()
    last_beat = _beat(path)
    announced = False
    while not _try(lock, path):
        now = time.monotonic()
        beat = _beat(path)
        if beat != last_beat:
            last_beat, moved = beat, now
        owner = _owner(path)
        name = owner.describe() if owner else "another process"
        if not announced:
            announced = True
            on_wait(name)
        if now - moved >= limits.stale_seconds:
            end_it = f" End it (kill {owner.process_id})" if owner else " End it"
            raise ModelError(
                f"{name} holds {what} and has shown no life for {now - moved:.0f} s.{end_it} and"
                " try again."
            )
        if now - begun >= limits.wait_seconds:
            raise ModelError(
                f"Gave up after waiting {now - begun:.0f} s for {what}, held by {name}. Try again"
                " when it is done."
            )
        await asyncio.sleep(_POLL_SECONDS)
    try:
        _record(path)
        beating = asyncio.create_task(_keep_beating(path), name="model-lock-beat")
        try:
            yield
        finally:
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating
    finally:
        _release(lock, path)


@contextmanager
def held_now(path: Path, what: str) -> Iterator[None]:
    """Hold the lock at `path` for the length of the block, or fail at once.

    Raises:
        ModelError: another process holds it; the text names it.
    """
    lock = _lock(path)
    if not _try(lock, path):
        owner = _owner(path)
        name = owner.describe() if owner else "Another process"
        raise ModelError(f"{name} holds {what}. Try again when it is done.")
    try:
        _record(path)
        yield
    finally:
        _release(lock, path)


def _lock(path: Path) -> filelock.BaseFileLock:
    # Not thread-local: what an event loop acquires it may release from another thread.
    return filelock.FileLock(path, thread_local=False)


def _try(lock: filelock.BaseFileLock, path: Path) -> bool:
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        return False
    except NotImplementedError as error:
        raise ModelError(
            f"The file system of {path.parent} has no locks. Choose a folder on a local disk."
        ) from error
    except OSError as error:
        raise ModelError(
            f"Cannot write to the models folder {path.parent}: {error.strerror}. Check its owner"
            " and permissions."
        ) from error
    return True


def _release(lock: filelock.BaseFileLock, path: Path) -> None:
    _owner_path(path).unlink(missing_ok=True)
    lock.release()


def _owner_path(path: Path) -> Path:
    return path.with_name(path.name + ".owner")


def _record(path: Path) -> None:
    owner = {"process_id": os.getpid(), "host": socket.gethostname()}
    with suppress(OSError):  # it only informs; a full disk stops the pull with a better text
        _owner_path(path).write_text(json.dumps(owner), encoding="utf-8")


def _owner(path: Path) -> LockOwner | None:
    try:
        read = json.loads(_owner_path(path).read_text(encoding="utf-8"))
        return LockOwner(int(read["process_id"]), str(read["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # just gone, or half written: whoever looks again sees it whole


def _beat(path: Path) -> int | None:
    """Return when the record was touched; only ever compared for change, so any clock will do."""
    try:
        return _owner_path(path).stat().st_mtime_ns
    except OSError:
        return None


async def _keep_beating(path: Path) -> None:
    while True:
        await asyncio.sleep(_BEAT_SECONDS)
        with suppress(OSError):  # a full or read-only disk is the pull's business, not the lock's
            os.utime(_owner_path(path))
