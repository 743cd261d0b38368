import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from controller.quality.embedding import (
    CachedEmbedding,
    EmbeddingUnavailableError,
    OnnxEmbedding,
    default_folder,
)


class CountingBackend:
    """Embeds a text by its length and counts what it was asked."""

    name = "counting/float"
    model = "counting"
    dimension = 3

    def __init__(self) -> None:
        self.asked: list[str] = []

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.asked += texts
        return np.array([[len(text), 0.0, 1.0] for text in texts], dtype=np.float32)


def test_repeated_prompts_are_embedded_once() -> None:
    backend = CountingBackend()
    cache = CachedEmbedding(backend)
    first = cache.embed(["a", "bb", "a"])
    assert backend.asked == ["a", "bb"]
    assert first[:, 0].tolist() == [1.0, 2.0, 1.0]
    assert cache.embed(["bb", "ccc"])[:, 0].tolist() == [2.0, 3.0]
    assert backend.asked == ["a", "bb", "ccc"]
    assert (cache.hits, cache.misses) == (1, 3)


def test_the_cache_forgets_the_prompt_unused_for_longest() -> None:
    backend = CountingBackend()
    cache = CachedEmbedding(backend, capacity=2)
    cache.embed(["a", "bb"])
    cache.embed(["a"])
    cache.embed(["ccc"])
    cache.embed(["a", "bb"])
    assert backend.asked == ["a", "bb", "ccc", "bb"]


def test_a_batch_greater_than_the_cache_is_answered_whole() -> None:
    texts = ["x" * length for length in range(1, 9)]
    assert CachedEmbedding(CountingBackend(), capacity=2).embed(texts)[:, 0].tolist() == list(
        range(1, 9)
    )


def test_no_text_gives_no_row() -> None:
    assert CachedEmbedding(CountingBackend()).embed([]).shape == (0, 3)


def test_a_cache_needs_room() -> None:
    with pytest.raises(ValueError, match="at least one"):
        CachedEmbedding(CountingBackend(), capacity=0)


def test_an_absent_model_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(EmbeddingUnavailableError, match="edge-controller embedding export"):
        OnnxEmbedding(tmp_path)


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        (json.dumps({"version": 99}), "version 99"),
        (json.dumps({"version": 1, "sha256": {}}), "cannot be read"),
    ],
)
def test_a_bad_folder_is_refused_with_what_to_do(tmp_path: Path, manifest: str, says: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(EmbeddingUnavailableError, match=says) as caught:
        OnnxEmbedding(tmp_path)
    assert "edge-controller embedding export" in str(caught.value)


def test_a_file_that_is_not_the_one_named_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 1, "sha256": {}}))
    (tmp_path / "model.int8.onnx").write_bytes(b"something")
    with pytest.raises(EmbeddingUnavailableError, match="not the file"):
        OnnxEmbedding(tmp_path)


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POINTSMAN_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "embedding"
