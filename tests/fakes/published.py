"""Where published data lies: in POINTSMAN_DATA, or in `shared/data` beside the checkout."""

import os
from pathlib import Path
from typing import Final

import pytest

PUBLISHED: Final = Path(
    os.environ.get("POINTSMAN_DATA") or Path(__file__).parents[3] / "shared" / "data"
)


def published(name: str) -> Path:
    """A file or folder of it; skips the test where there is none."""
    path = PUBLISHED / name
    if not path.exists():
        pytest.skip(f"there is no {path}; POINTSMAN_DATA may name the folder that holds {name}")
    return path
