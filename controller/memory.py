"""How a long-lived process keeps memory: what it no longer needs goes back to the system."""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# glibc's names of the settings, from its malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_ARENAS: Final = 2
_OWN_MAPPING_BYTES: Final = 1 << 20
"""Allocations from this size on are mapped each by itself. By default glibc raises its limit, up to
32 MiB, when such an array is freed, and from then on arrays leave holes in the heap."""

_MADV_DONTNEED: Final = 4
"""Linux's, from its mman.h; Python's `mmap` offers it for mappings of its own only."""

_MAPPING: Final = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<access>\S{4}) \S+ \S+ \d+ +(?P<file>/.*)$"
)
_ANONYMOUS: Final = re.compile(r"^Anonymous: +(?P<kilobytes>\d+) kB$")


def keep_heaps_small() -> None:
    """Have all threads share two of glibc's heaps, and keep large arrays out of them.

    What one thread freed is of no use to another thread's heap, and nearly all allocations happen
    under the interpreter's lock anyway. For the start of a process; does nothing elsewhere.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_ARENA_MAX, _ARENAS)
        library.mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _OWN_MAPPING_BYTES)


def release_freed_memory() -> None:
    """Have the C library return what is free between things in use; glibc keeps it otherwise.

    Takes some milliseconds, without the interpreter's lock. Does nothing where the C library has
    no such call.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_code(library: str) -> int:
    """Let go of a shared library's code, for one that has done its work and is seldom asked again.

    Its file has all of it, so the system reads a page back when it is needed. Pages that were
    written to stay, relocated tables among them. Does nothing where there is no /proc.

    Args:
        library: how the name of its file begins, such as "libllvmlite".

    Returns:
        Bytes of the process's address space that were let go of, in memory or not.
    """
    released = 0
    with contextlib.suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, end in _unwritten_mappings(library):
            if madvise(start, end - start, _MADV_DONTNEED) == 0:
                released += end - start
    return released


def _unwritten_mappings(library: str) -> Iterator[tuple[int, int]]:
    """Address ranges of a library's file that the process cannot write to, and has not.

    Raises:
        OSError: there is no /proc.
    """
    found = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        mapping = _MAPPING.match(line)
        if mapping is not None or "-" in line.partition(" ")[0]:
            found = mapping
            continue
        written = _ANONYMOUS.match(line)
        if found is None or written is None:
            continue
        is_wanted = Path(found["file"]).name.startswith(library)
        # A page that the loader wrote to before it was made read-only would lose what was written.
        if is_wanted and "w" not in found["access"] and written["kilobytes"] == "0":
            yield int(found["start"], 16), int(found["end"], 16)
