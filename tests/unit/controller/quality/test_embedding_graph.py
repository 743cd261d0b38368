"""The encoder's graph against a plain NumPy BERT, on small random weights."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from controller.quality.embedding_graph import (
    EncoderShape,
    InvalidWeightsError,
    build_encoder,
    read_safetensors,
)

SHAPE = EncoderShape(layers=2, heads=2, hidden=16, positions=12, epsilon=1e-12)
WORDS, INNER = 40, 32

Tensors = dict[str, NDArray[np.float32]]


def random_weights() -> Tensors:
    rng = np.random.default_rng(0)
    hidden = SHAPE.hidden

    def matrix(*shape: int) -> NDArray[np.float32]:
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    tensors = {
        "embeddings.word_embeddings.weight": matrix(WORDS, hidden),
        "embeddings.position_embeddings.weight": matrix(SHAPE.positions, hidden),
        "embeddings.token_type_embeddings.weight": matrix(2, hidden),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(SHAPE.layers):
        prefix = f"encoder.layer.{layer}."
        sizes = {
            "attention.self.query": (hidden, hidden),
            "attention.self.key": (hidden, hidden),
            "attention.self.value": (hidden, hidden),
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (INNER, hidden),
            "output.dense": (hidden, INNER),
        }
        for name, size in sizes.items():
            tensors[f"{prefix}{name}.weight"] = matrix(*size)
            tensors[f"{prefix}{name}.bias"] = matrix(size[0])
        norms += [f"{prefix}attention.output.LayerNorm", f"{prefix}output.LayerNorm"]
    for name in norms:
        tensors[f"{name}.weight"] = 1.0 + matrix(hidden)
        tensors[f"{name}.bias"] = matrix(hidden)
    return tensors


def reference(tensors: Tensors, ids: list[int]) -> NDArray[np.float64]:
    """One text without padding, as the BERT paper has it."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt(centred.var(-1, keepdims=True))
        return np.asarray(centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"])

    def linear(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return np.asarray(x @ w[f"{name}.weight"].T + w[f"{name}.bias"])

    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    size = SHAPE.hidden // SHAPE.heads
    for layer in range(SHAPE.layers):
        prefix = f"encoder.layer.{layer}."
        query, key, value = (
            linear(x, f"{prefix}attention.self.{kind}") for kind in ("query", "key", "value")
        )
        mixed = []
        for head in range(SHAPE.heads):
            of_head = slice(head * size, (head + 1) * size)
            scores = np.exp(query[:, of_head] @ key[:, of_head].T / math.sqrt(size))
            mixed.append(scores / scores.sum(-1, keepdims=True) @ value[:, of_head])
        attended = linear(np.concatenate(mixed, axis=1), f"{prefix}attention.output.dense")
        x = norm(attended + x, f"{prefix}attention.output.LayerNorm")
        inner = linear(x, f"{prefix}intermediate.dense")
        inner = inner * 0.5 * (1.0 + np.vectorize(math.erf)(inner / math.sqrt(2.0)))
        x = norm(linear(inner, f"{prefix}output.dense") + x, f"{prefix}output.LayerNorm")
    mean = x.mean(axis=0)
    return np.asarray(mean / np.linalg.norm(mean))


def run(model: bytes, texts: list[list[int]]) -> NDArray[np.float32]:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    length = max(map(len, texts))
    ids = np.array([text + [0] * (length - len(text)) for text in texts], dtype=np.int64)
    mask = np.array([[1] * len(t) + [0] * (length - len(t)) for t in texts], dtype=np.int64)
    return np.asarray(session.run(None, {"input_ids": ids, "attention_mask": mask})[0])


TEXTS = [[1, 5, 9, 2], [1, 30, 2], [1, 7, 7, 11, 39, 3, 4, 2]]


@pytest.mark.parametrize(("is_int8", "within"), [(False, 1e-5), (True, 0.06)])
def test_the_graph_is_bert_with_padding_left_out(is_int8: bool, within: float) -> None:
    pytest.importorskip("onnx")
    tensors = random_weights()
    found = run(build_encoder(tensors, SHAPE, is_int8=is_int8), TEXTS)
    expected = np.stack([reference(tensors, text) for text in TEXTS])
    assert np.abs(found - expected).max() < within
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-5)


def test_a_missing_tensor_is_named() -> None:
    pytest.importorskip("onnx")
    tensors = random_weights()
    del tensors["encoder.layer.1.output.dense.bias"]
    with pytest.raises(InvalidWeightsError, match=r"encoder.layer.1.output.dense.bias"):
        build_encoder(tensors, SHAPE, is_int8=False)


def test_only_bert_is_built() -> None:
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 16,
        "max_position_embeddings": 12,
    }
    assert EncoderShape.from_config(config) == SHAPE
    with pytest.raises(InvalidWeightsError, match="hidden_act 'relu'"):
        EncoderShape.from_config({**config, "hidden_act": "relu"})
    with pytest.raises(InvalidWeightsError, match="lacks a size"):
        EncoderShape.from_config({"hidden_size": 16})


def write_safetensors(path: Path, tensors: Tensors) -> None:
    header, data = {}, b""
    for name, tensor in tensors.items():
        start = len(data)
        data += tensor.astype("<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [start, len(data)],
        }
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def test_safetensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    tensors = random_weights()
    write_safetensors(tmp_path / "w.safetensors", tensors)
    found = read_safetensors(tmp_path / "w.safetensors")
    assert found.keys() == tensors.keys()
    assert all((found[name] == tensors[name]).all() for name in tensors)


@pytest.mark.parametrize("keep_bytes", [0, 5, 100, -64])
def test_cut_safetensors_are_refused(tmp_path: Path, keep_bytes: int) -> None:
    path = tmp_path / "w.safetensors"
    write_safetensors(path, random_weights())
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(InvalidWeightsError):
        read_safetensors(path)
