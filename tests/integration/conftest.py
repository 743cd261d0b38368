"""What several integration tests start with."""

import pytest

from controller.config import QualitySettings
from controller.quality.embedding import MANIFEST_FILE, default_folder


@pytest.fixture
def embedding() -> QualitySettings:
    """Settings with the real embedding model."""
    folder = default_folder()
    if not (folder / MANIFEST_FILE).exists():
        pytest.skip(f"no embedding model in {folder}; run `edge-controller embedding export`")
    return QualitySettings(embedding_dir=str(folder))
