"""Locks that keep a folder to one process."""

import fcntl
from pathlib import Path
from typing import IO


def lock_file(path: Path) -> IO[bytes]:
    """A file, made when absent, that nobody else can lock until it is closed.

    The kernel lets go of it when the process ends, however it does.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be written.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file
