"""A file system of a few hundred kilobytes, to be filled, grown and made read-only."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount one on a new folder; skips the test where nothing may be mounted."""
    folder.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True, timeout=60)


def remount(folder: Path, option: str) -> None:
    """Change it, such as by "ro" or "size=20m"."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True, timeout=60)


def fill(folder: Path, left_bytes: int = 0) -> Path:
    """Take all space but so much; returns the file to remove for getting it back."""
    ballast = folder / "ballast"
    free = os.statvfs(folder)
    ballast.write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - left_bytes)))
    return ballast
