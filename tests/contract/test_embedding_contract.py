"""What every embedding backend promises, asked of the real model where it has been exported."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from controller.quality.embedding import (
    CachedEmbedding,
    EmbeddingBackend,
    EmbeddingUnavailableError,
    OnnxEmbedding,
    default_folder,
)
from tests.fakes.reference_embedding import SentenceTransformersEmbedding

QUESTIONS = (
    "What is the derivative of x squared?",
    "How do you differentiate a quadratic function?",
    "Which river flows through Paris?",
)


def _int8() -> EmbeddingBackend:
    return OnnxEmbedding(threads=1)


def _float() -> EmbeddingBackend:
    return OnnxEmbedding(is_int8=False, threads=1)


def _cached() -> EmbeddingBackend:
    return CachedEmbedding(_int8())


def _reference() -> EmbeddingBackend:
    return SentenceTransformersEmbedding(Path(os.environ[REFERENCE]))


REFERENCE = "POINTSMAN_REFERENCE_WEIGHTS"
"""Names the folder of the published model where sentence-transformers is to be asked, too."""

BACKENDS = {"int8": _int8, "float": _float, "cached": _cached}
if REFERENCE in os.environ:
    BACKENDS["reference"] = _reference


@pytest.fixture(scope="module", params=list(BACKENDS.values()), ids=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> EmbeddingBackend:
    try:
        made: EmbeddingBackend = request.param()
    except EmbeddingUnavailableError as error:
        pytest.skip(str(error))
    return made


def test_each_row_has_length_1(backend: EmbeddingBackend) -> None:
    found = backend.embed(QUESTIONS)
    assert found.dtype == np.float32
    assert found.shape == (3, backend.dimension)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-4)


def test_like_questions_lie_closer_than_unlike_ones(backend: EmbeddingBackend) -> None:
    calculus, also_calculus, rivers = backend.embed(QUESTIONS)
    assert calculus @ also_calculus > 0.5 > 0.3 > calculus @ rivers


@pytest.mark.parametrize(
    "texts",
    [
        [],
        [""],
        ["\x00", " \n\t "],
        ["\ud800 half a pair"],
        ["\U0001f980" * 50, "ไม่รู้จักภาษานี้"],
        ["word " * 5000],
    ],
    ids=["none", "empty", "control", "surrogate", "symbols", "long"],
)
def test_any_text_is_embedded(backend: EmbeddingBackend, texts: Sequence[str]) -> None:
    found = backend.embed(texts)
    assert found.shape == (len(texts), backend.dimension)
    assert np.isfinite(found).all()


def test_a_text_is_embedded_alike_wherever_it_stands(backend: EmbeddingBackend) -> None:
    filler = [f"Filler sentence number {n} about nothing at all." * (n % 4) for n in range(20)]
    alone = backend.embed([QUESTIONS[0]])[0]
    for texts in ([QUESTIONS[0], *filler], [*filler, QUESTIONS[0]]):
        found = backend.embed(texts)[texts.index(QUESTIONS[0])]
        assert alone @ found > 0.98


def test_serving_needs_neither_torch_nor_onnx() -> None:
    if not (default_folder() / "manifest.json").exists():
        pytest.skip("no embedding model; make one with `edge-controller embedding export`")
    program = (
        "import sys; from controller.quality.embedding import OnnxEmbedding\n"
        "OnnxEmbedding(threads=1).embed(['a question'])\n"
        "print(sorted({'torch', 'onnx', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "[]"


def test_every_backend_embeds_as_the_float_model_does(backend: EmbeddingBackend) -> None:
    if not (default_folder() / "manifest.json").exists():
        pytest.skip("no embedding model; make one with `edge-controller embedding export`")
    agreement = np.einsum("nd,nd->n", backend.embed(QUESTIONS), _float().embed(QUESTIONS))
    assert agreement.min() > (0.9999 if backend.name.endswith(("/float", "/reference")) else 0.97)
