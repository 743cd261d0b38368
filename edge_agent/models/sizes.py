"""Sizes of files that another process may move or remove meanwhile.

pip fills and empties its folders while a pull counts what has arrived, and `models list` looks
while another process pulls. `Path.rglob` raises when a folder goes away between being listed and
being entered (until Python 3.13); nothing here does.
"""

import os
from collections.abc import Iterator
from pathlib import Path


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 when it is not there, or no longer."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def file_sizes(folder: Path) -> Iterator[int]:
    """Yield the sizes in bytes of the files in a folder and below it, as long as they are there."""
    for inner, _, names in os.walk(folder):  # it passes over a folder that cannot be listed
        for name in names:
            try:
                size_bytes = os.stat(os.path.join(inner, name)).st_size
            except OSError:
                continue
            yield size_bytes
