"""Reading the small text files under /sys."""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MAX_BYTES: Final = 4096  # sysfs gives no more at once


def read_text(path: Path) -> str | None:
    """The file's text without blanks at its ends; None when it cannot be read."""
    try:
        # Without the layers of `open`: sensors read a few of these ten times a second.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.read(handle, _MAX_BYTES)
        finally:
            os.close(handle)
    except OSError:
        return None
    return content.decode("utf-8", errors="replace").strip("\0 \t\r\n")


def read_number(path: Path) -> int | None:
    """The whole number in the file; None when it cannot be read or is none."""
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def in_order(folder: Path, pattern: str) -> list[Path]:
    """What matches, by name with numbers in their order; nothing when the folder is not there.

    A device that is unplugged meanwhile is passed over: `Path.glob` would raise.
    """
    return sorted((folder / name for name in glob.glob(pattern, root_dir=folder)), key=_natural)


def hwmon_named(root: Path, name: str) -> Iterator[Path]:
    """The hwmon folders with this name; their numbers change from boot to boot."""
    for folder in in_order(root / "sys/class/hwmon", "hwmon*"):
        if read_text(folder / "name") == name:
            yield folder


def _natural(path: Path) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", path.as_posix())
    ]
