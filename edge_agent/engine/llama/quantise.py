"""Makes another quantisation of a GGUF file with llama.cpp's quantiser, in a spawned child."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edge_agent.engine.llama.child import start_child
from edge_agent.errors import ModelError, ModelFileError

# Names that llama.cpp's quantiser takes without an importance matrix.
QUANTISATIONS: Final = frozenset(
    {
        "F16",
        "BF16",
        "Q8_0",
        "Q6_K",
        "Q5_0",
        "Q5_1",
        "Q5_K_S",
        "Q5_K_M",
        "Q4_0",
        "Q4_1",
        "Q4_K_S",
        "Q4_K_M",
        "IQ4_NL",
        "IQ4_XS",
        "Q3_K_S",
        "Q3_K_M",
        "Q3_K_L",
        "Q2_K",
    }
)

# A Raspberry Pi 5 with an SD card quantises some 5 MB a second; this leaves room for worse.
_BASE_DEADLINE_SECONDS: Final = 120.0
_SLOWEST_BYTES_PER_SECOND: Final = 1_000_000.0


async def quantise(
    source: Path,
    target: Path,
    quantisation: str,
    threads: int,
    *,
    deadline_seconds: float | None = None,
) -> None:
    """Write `target`, the weights of `source` in another quantisation.

    The target gets its name only when it is whole and on the disk, so a half-written file is
    never seen; an existing target is replaced. A source that is already quantised is quantised
    again, at some loss. The wait is as long as the weights are large; the loop is never blocked,
    and cancelling ends the child and removes what it wrote.

    Args:
        source: a GGUF file.
        target: where the result goes; its folder must exist.
        quantisation: one of `QUANTISATIONS`, in any case, such as "Q4_0".
        threads: of the child, at least 1.
        deadline_seconds: None scales one with the size of the source.

    Raises:
        ModelFileError: the source is missing or no GGUF file, or the target cannot be written.
        ModelError: the quantisation is unknown, the quantiser refused or crashed, the deadline
            passed, or another process is making the same target.
    """
    name = quantisation.upper()
    if name not in QUANTISATIONS:
        known = ", ".join(sorted(QUANTISATIONS))
        raise ModelError(f"There is no quantisation {quantisation!r}; use one of {known}.")
    if threads < 1:
        raise ModelError(f"Quantising needs at least 1 thread, not {threads}.")
    source_bytes = await asyncio.to_thread(_checked_size, source)
    if deadline_seconds is None:
        deadline_seconds = _BASE_DEADLINE_SECONDS + source_bytes / _SLOWEST_BYTES_PER_SECOND
    partial = target.with_name(f".{target.name}.quantising")
    with _claimed(partial):
        child = await start_child(
            ["quantise", str(source), str(partial), name, str(threads)],
            niceness=10,
        )
        try:
            status = await asyncio.wait_for(child.wait(), timeout=deadline_seconds)
        except asyncio.TimeoutError:
            raise ModelError(
                f"Quantising {source.name} to {name} took longer than {deadline_seconds:.0f} s;"
                " give it a faster machine or a longer deadline."
            ) from None
        finally:
            await child.stop()
        if status != 0:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            last_words = child.stderr_tail.splitlines()[-1:] or ["it said nothing"]
            raise ModelError(
                f"llama.cpp's quantiser failed on {source.name} ({how}): {last_words[0]}"
            )
        await asyncio.to_thread(_put_in_place, partial, target)


def _checked_size(source: Path) -> int:
    try:
        with source.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelFileError(f"{source} is no GGUF file; pull the model again.")
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise ModelFileError(f"There is no file {source}; pull the model first.") from None
    except OSError as error:
        raise ModelFileError(f"{source} cannot be read: {error.strerror}.") from error


def _put_in_place(partial: Path, target: Path) -> None:
    try:
        os.replace(partial, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # without it the new name can be lost with the power
        finally:
            os.close(folder)
    except OSError as error:
        raise ModelFileError(f"{target} cannot be written: {error.strerror}.") from error


@contextlib.contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """Hold the partial file alone; on the way out it is gone unless it was renamed.

    The lock is on the file itself and dies with this process, so a killed agent leaves nothing
    that has to be cleaned up by hand.
    """
    descriptor = -1
    try:
        while True:
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have renamed it between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(partial)):
                    break
            os.close(descriptor)
            descriptor = -1
    except BlockingIOError:
        os.close(descriptor)
        raise ModelError(
            f"Another process is making {partial.name}; wait for it to finish."
        ) from None
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise ModelFileError(f"{partial} cannot be written: {error.strerror}.") from error
    try:
        yield
    finally:
        # Gone when the file was renamed; and still ours alone, since the lock is held.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(partial)):
                partial.unlink()
        os.close(descriptor)
