"""How the C library keeps memory: what is freed goes back to the system."""

import contextlib
import ctypes
from typing import Final

_M_ARENA_MAX: Final = -8
"""glibc's name of the setting, from its malloc.h."""

_ARENAS: Final = 2


def share_arenas() -> None:
    """Have all threads share two of glibc's heaps instead of eight for each core.

    What one thread freed is of no use to another thread's heap, and nearly all allocations happen
    under the interpreter's lock anyway. For the start of a process; does nothing elsewhere.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def release_freed_memory() -> None:
    """Have the C library return what is free between things in use; glibc keeps it otherwise.

    Takes some milliseconds, without the interpreter's lock. Does nothing where the C library has
    no such call.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
