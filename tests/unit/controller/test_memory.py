import platform
import sys
from pathlib import Path

import pytest

from controller.memory import release_freed_memory

_PIECE_BYTES = 100_000  # below the size that glibc always gives back at once


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="for glibc alone"
)
def test_what_was_freed_between_things_in_use_is_given_back() -> None:
    pieces = [bytes([1]) * _PIECE_BYTES for _ in range(1000)]
    kept = pieces[::50]  # holes of 4.9 MB, the last thing still in use
    pieces.clear()
    before = resident_bytes()
    release_freed_memory()
    assert before - resident_bytes() > 0.5 * 1000 * _PIECE_BYTES
    assert len(kept) == 20
