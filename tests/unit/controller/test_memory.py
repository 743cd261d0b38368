"""What is no longer needed goes back to the system; each in a process of its own, as it serves."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="for glibc alone"
)

_RESIDENT = """
from pathlib import Path

def resident(part):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{part}:"):
            return int(line.split()[1]) / 1024  # MiB
"""


def printed(program: str) -> list[float]:
    """The numbers that a program prints, one a line."""
    done = subprocess.run(
        [sys.executable, "-c", _RESIDENT + program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [float(line) for line in done.stdout.split()]


def test_what_was_freed_between_things_in_use_is_given_back() -> None:
    before, after = printed("""
from controller.memory import release_freed_memory

pieces = [bytes([1]) * 100_000 for _ in range(1000)]  # too small to be mapped each by itself
kept = pieces[::50]  # holes of 4.9 MB, the last thing still in use
pieces.clear()
print(resident("VmRSS"))
release_freed_memory()
print(resident("VmRSS"))
""")
    assert before - after > 50.0


def test_large_arrays_leave_no_holes_in_the_heap() -> None:
    before, after = printed("""
from controller.memory import keep_heaps_small

keep_heaps_small()
bytes([1]) * 30_000_000  # from here on glibc itself would keep up to as much in its heap
print(resident("VmRSS"))
pieces = [bytes([1]) * 2_000_000 for _ in range(50)]
kept = pieces[::10]
pieces.clear()
print(resident("VmRSS"))
""")
    assert after - before < 5 * 2.0 + 2.0


def test_a_library_goes_on_working_when_its_code_was_let_go_of() -> None:
    before, released, after, product, again = printed("""
import numba
from controller.memory import release_code

def compiled(factor):
    return numba.njit(lambda value: factor * value)

assert compiled(2.0)(3.0) == 6.0
print(resident("RssFile"))
print(release_code("libllvmlite") / 2**20)
print(resident("RssFile"))
print(compiled(4.0)(5.0))
print(resident("RssFile"))
""")
    assert released > 40.0
    assert before - after > 0.5 * before
    assert product == 20.0
    assert again > after


def test_a_library_that_is_not_there_has_no_code_to_let_go_of() -> None:
    assert printed("""
from controller.memory import release_code

print(release_code("libnothing"))
""") == [0.0]
