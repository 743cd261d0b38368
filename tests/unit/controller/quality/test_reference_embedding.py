import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from controller.quality.embedding import EmbeddingUnavailableError
from tests.fakes.reference_embedding import SentenceTransformersEmbedding


class FakeTransformer:
    """Embeds every text alike."""

    def __init__(self, folder: str, **options: object) -> None:
        if "damaged" in folder:
            raise OSError("no weights")
        assert options["local_files_only"] is True

    def encode(self, texts: str | list[str], **options: object) -> object:
        return np.eye(3)[0] if isinstance(texts, str) else np.eye(3)[[0] * len(texts)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sentence_transformers")
    module.__dict__["SentenceTransformer"] = FakeTransformer
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)


@pytest.mark.usefixtures("library")
def test_it_embeds_with_the_library(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    backend = SentenceTransformersEmbedding(tmp_path)
    assert backend.dimension == 3
    assert backend.embed(["a", "\ud800"]).dtype == np.float32
    assert backend.embed([]).shape == (0, 3)


@pytest.mark.usefixtures("library")
def test_a_folder_without_a_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EmbeddingUnavailableError, match=r"modules\.json"):
        SentenceTransformersEmbedding(tmp_path)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "modules.json").write_text("[]")
    with pytest.raises(EmbeddingUnavailableError, match="does not load"):
        SentenceTransformersEmbedding(damaged)


def test_without_the_library_it_says_which_extra_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(EmbeddingUnavailableError, match="extra `train`"):
        SentenceTransformersEmbedding(tmp_path)
