"""Digests of files, by which a store notices that one was altered or torn."""

import hashlib
from pathlib import Path


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal; read in pieces, whatever its size.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
