"""Where end-to-end tests find real weights."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"


@pytest.fixture(scope="session")
def find_weights() -> Callable[[str], Path]:
    """(file name) -> its path, in POINTSMAN_TEST_MODELS or the models' cache; skips if absent."""
    chosen = os.environ.get("POINTSMAN_TEST_MODELS")
    folder = Path(chosen) if chosen else Path.home() / ".cache/pointsman/models"

    def find(name: str) -> Path:
        path = folder / name
        if not path.exists():
            pytest.skip(f"there is no {path}; pull the model or set POINTSMAN_TEST_MODELS")
        return path

    return find


@pytest.fixture(scope="session")
def smollm2(find_weights: Callable[[str], Path]) -> Path:
    """SmolLM2 135M Instruct in Q4_1; it carries a chat template."""
    return find_weights(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3(find_weights: Callable[[str], Path]) -> Path:
    """Gemma 3 270M in Q4_K_M; a base model without a chat template."""
    return find_weights(GEMMA3)
