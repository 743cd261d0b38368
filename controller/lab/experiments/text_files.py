"""Texts that an experiment leaves behind."""

import math
import os
from collections.abc import Mapping
from pathlib import Path


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write each file at once or not at all; the paths.

    Args:
        folder: made if absent; files there of the same names are replaced.
        texts: by file name.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in texts.items():
        partial = folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, folder / name)
        written.append(folder / name)
    return written


def without_nan(value: object) -> object:
    """The same plain value with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
