"""How the searches are compiled: Numba, with machine code kept between runs.

Import this only from modules that compile something: it imports Numba, which takes a while.
"""

import contextlib
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numba
import numpy as np
from llvmlite import binding
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])


STALE_AFTER_DAYS: Final = 7
"""Code of other versions that nothing has used for so long is removed."""

_FOLDER_NAME: Final = re.compile(r"pointsman-[0-9a-f]{16}")

_MARKS_PREFIX: Final = "for-"

_COMPILED_BY_OTHERS: Final = ("compiled.py", "completion.py")
"""Sources with compiled functions that do not import this module."""


def sources_below(folder: Path) -> list[Path]:
    """Python files in a folder and below it, in order.

    Machine code is kept beside them, in `__pycache__`, where other processes make and remove
    folders; what goes away meanwhile is passed over.
    """
    found: list[Path] = []
    for inner, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(inner, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _cache_folder() -> Path | None:
    """Where machine code is kept; None when no place is writable.

    Numba notices a change of the file that a function stands in, but not of a file that it calls
    into. So the folder's name carries a digest of all sources with compiled functions: code
    compiled from other sources is never found. NUMBA_CACHE_DIR, when set, is where it is made.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sources_below(here):
        text = source.read_bytes()
        if b"routing.compiled import" in text or source.name in _COMPILED_BY_OTHERS:
            digest.update(text)
    name = f"pointsman-{digest.hexdigest()[:16]}"
    wanted = os.environ.get("NUMBA_CACHE_DIR")
    if wanted:
        bases = [Path(wanted)]
    else:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache")
        bases = [here / "__pycache__", home]
    for base in bases:
        folder = base / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            with contextlib.suppress(OSError):
                os.utime(folder)  # in use: says so to processes of other versions
            _remove_stale(base, folder.name)
            return folder
    return None


def _remove_stale(base: Path, current: str) -> None:
    """Remove the code of other digests that no process has started with for `STALE_AFTER_DAYS`.

    Never fails: what cannot be removed stays. The emptied folders stay as well, because a process
    of another version that still runs, and compiles something new, expects its own to be there.
    """
    oldest = time.time() - STALE_AFTER_DAYS * 86_400
    with contextlib.suppress(OSError):
        for entry in base.iterdir():
            if entry.name == current or not _FOLDER_NAME.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):  # another process removes it as well
                if entry.is_symlink() or not entry.is_dir() or entry.stat().st_mtime >= oldest:
                    continue
                _remove_code(entry)


def _remove_code(folder: Path) -> None:
    # Not `Path.rglob`, which raises when a folder goes away before it is entered.
    for inner, _, names in os.walk(folder):
        is_of_marks = Path(inner).parent == folder and Path(inner).name.startswith(_MARKS_PREFIX)
        for name in names:
            if is_of_marks or name.endswith((".nbc", ".nbi")):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(inner, name))


_FOLDER: Final = _cache_folder()
if _FOLDER is not None:
    # The package re-exports the module without declaring its settings.
    vars(numba.config)["CACHE_DIR"] = str(_FOLDER)


def kept_code() -> Path | None:
    """A folder for marks on machine code that is kept, whether it exists or not; None if none is.

    Numba reads code back that the same Numba made for the same processor and Python; each such
    combination has a folder of its own.
    """
    if _FOLDER is None:
        return None
    made_for = (
        numba.__version__,
        sys.implementation.cache_tag,
        binding.get_process_triple(),
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
    )
    digest = hashlib.sha256("\n".join(str(part) for part in made_for).encode()).hexdigest()
    return _FOLDER / f"{_MARKS_PREFIX}{digest[:16]}"


def _compiled(function: Function, **options: bool) -> Function:
    njit: Any = numba.njit
    decorated: Function = njit(
        cache=_FOLDER is not None, error_model="numpy", no_cfunc_wrapper=True, **options
    )(function)
    return decorated


def compiled(function: Function) -> Function:
    """Compile on first call; the machine code is read back in later processes."""
    return _compiled(function)


def compiled_part(function: Function) -> Function:
    """As `compiled`, for what only compiled code calls.

    It cannot be called from Python: the code that would unpack its arguments takes as long to
    compile as most of these functions themselves.
    """
    return _compiled(function, no_cpython_wrapper=True)


def compiled_without_gil(function: Function) -> Function:
    """As `compiled`, and the event loop goes on while it runs.

    For the one long call of a search only: to get the GIL back may take longer than a short call.
    """
    return _compiled(function, nogil=True)


# The GIL must not be taken to look at a clock: another thread may hold it for longer than the
# whole budget. LLVM finds the symbol in the C library that the process has loaded already.
_types: Final[Any] = numba.types
_clock_gettime: Final = _types.ExternalFunction(
    "clock_gettime", _types.int32(_types.int32, _types.uintp)
)


LEAST_RESERVE_NANOSECONDS: Final = 500_000
"""What a search that keeps a reserve stops earlier at least: on the way back it waits for the GIL,
which a serving process hands over every half millisecond."""


class Limits(NamedTuple):
    """When a compiled search must stop.

    Attributes:
        clock: int64[2]; scratch for the clock.
        clock_id: of the monotonic clock on this platform.
        deadline_nanoseconds: on that clock, of this part of the search; negative for none.
        end_nanoseconds: of the whole search. It stops so much earlier that a pause as long as
            the longest one may follow.
        most_reserve_nanoseconds: the most that it stops earlier; 0 keeps no reserve.
        pauses: int64[2]; when the clock was last looked at, and the longest time between two
            looks: on a busy machine the thread waits for a core meanwhile.
        max_evaluations: negative for none.
        evaluations: int64[1]; assignments and moves scored so far.
    """

    clock: NDArray[np.int64]
    clock_id: int
    deadline_nanoseconds: int
    end_nanoseconds: int
    most_reserve_nanoseconds: int
    pauses: NDArray[np.int64]
    max_evaluations: int
    evaluations: NDArray[np.int64]


def limits_until(
    deadline_nanoseconds: int | None,
    max_evaluations: int | None,
    most_reserve_nanoseconds: int = 0,
    expected_pause_nanoseconds: int = 0,
) -> Limits:
    """Limits with a fresh count. The deadline is on `time.monotonic_ns`.

    Args:
        most_reserve_nanoseconds: see `Limits`; 0 searches to the deadline.
        expected_pause_nanoseconds: the longest pause that earlier searches have met.
    """
    end = -1 if deadline_nanoseconds is None else deadline_nanoseconds
    return Limits(
        clock=np.zeros(2, dtype=np.int64),
        clock_id=time.CLOCK_MONOTONIC,
        deadline_nanoseconds=end,
        end_nanoseconds=end,
        most_reserve_nanoseconds=most_reserve_nanoseconds,
        pauses=np.array([0, expected_pause_nanoseconds], dtype=np.int64),
        max_evaluations=-1 if max_evaluations is None else max_evaluations,
        evaluations=np.zeros(1, dtype=np.int64),
    )


@compiled_part
def nanoseconds(limits: Limits) -> Any:
    """int64: the monotonic clock now."""
    _clock_gettime(limits.clock_id, limits.clock.ctypes.data)
    return limits.clock[0] * 1_000_000_000 + limits.clock[1]


@compiled_part
def exhausted(limits: Limits) -> bool:
    """Whether a limit is reached. Looks at no clock when there is no deadline."""
    if limits.max_evaluations >= 0 and limits.evaluations[0] >= limits.max_evaluations:
        return True
    if limits.deadline_nanoseconds < 0:
        return False
    now = nanoseconds(limits)
    pauses = limits.pauses
    if pauses[0] > 0:
        pauses[1] = max(pauses[1], now - pauses[0])
    pauses[0] = now
    reserve = min(max(LEAST_RESERVE_NANOSECONDS, pauses[1]), limits.most_reserve_nanoseconds)
    return bool(now >= limits.deadline_nanoseconds or now + reserve >= limits.end_nanoseconds)


# xorshift64*: 8 bytes of state, the same numbers on every platform, no global state.
# Source: S. Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled",
# ACM Transactions on Mathematical Software 42(4), 2016.
_MULTIPLIER: Final = np.uint64(0x2545F4914F6CDD1D)
_S11, _S12, _S25, _S27, _S32 = (np.uint64(shift) for shift in (11, 12, 25, 27, 32))


def random_state(rng: np.random.Generator) -> NDArray[np.uint64]:
    """uint64[1], never 0: what `random_index` and `random_unit` advance."""
    return np.array([rng.integers(1, 2**63)], dtype=np.uint64)


@compiled_part
def _next(state: NDArray[np.uint64]) -> Any:
    x = state[0]
    x ^= x >> _S12
    x ^= x << _S25
    x ^= x >> _S27
    state[0] = x
    return x * _MULTIPLIER


@compiled_part
def random_index(state: NDArray[np.uint64], size: int) -> Any:
    """int64, uniform in [0, size); size at most 2**32."""
    return np.int64(((_next(state) >> _S32) * np.uint64(size)) >> _S32)


@compiled_part
def random_unit(state: NDArray[np.uint64]) -> Any:
    """float64, uniform in [0, 1)."""
    return np.float64(_next(state) >> _S11) * (1.0 / 9007199254740992.0)


@compiled_part
def stable_order(values: NDArray[Any]) -> NDArray[np.int64]:
    """int64: indices that sort `values`, equal ones in their order.

    A merge from the bottom up. NumPy's sort is the same and takes Numba seconds to compile.
    """
    n = values.size
    order = np.arange(n)
    merged = np.empty(n, dtype=np.int64)
    width = 1
    while width < n:
        for low in range(0, n, 2 * width):
            middle = min(low + width, n)
            high = min(low + 2 * width, n)
            i = low
            j = middle
            for k in range(low, high):
                if i < middle and (j >= high or values[order[i]] <= values[order[j]]):
                    merged[k] = order[i]
                    i += 1
                else:
                    merged[k] = order[j]
                    j += 1
        order, merged = merged, order
        width *= 2
    return order
