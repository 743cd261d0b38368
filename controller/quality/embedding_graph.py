"""The ONNX graphs of a MiniLM sentence encoder, built from its weights without torch.

BERT (Devlin et al. 2018) as in Hugging Face's reference, then the mean over the tokens that are not
padding, then length 1, as sentence-transformers has it for all-MiniLM-L6-v2. Attention, the sums
before layer normalisation and GELU are onnxruntime's fused operators, so the graphs run there only.

Needs the `onnx` package, which serving does not import.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_FUSED: Final = "com.microsoft"
_OPSET: Final = 17
_IR_VERSION: Final = 8
_DTYPES: Final = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}


class InvalidWeightsError(ValueError):
    """The weights or their description are not those of a BERT sentence encoder."""


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Sizes of the encoder, from its config.json."""

    layers: int
    heads: int
    hidden: int
    positions: int
    epsilon: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "EncoderShape":
        """The shape a config.json describes.

        Raises:
            InvalidWeightsError: it is not a BERT with GELU and absolute positions.
        """
        for name, wanted in (
            ("model_type", "bert"),
            ("hidden_act", "gelu"),
            ("position_embedding_type", "absolute"),
        ):
            if config.get(name, wanted) != wanted:
                raise InvalidWeightsError(f"config.json has {name} {config[name]!r}, not {wanted}")
        try:
            return cls(
                layers=int(config["num_hidden_layers"]),
                heads=int(config["num_attention_heads"]),
                hidden=int(config["hidden_size"]),
                positions=int(config["max_position_embeddings"]),
                epsilon=float(config.get("layer_norm_eps", 1e-12)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidWeightsError(f"config.json lacks a size: {error}") from error


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """Tensors by name, mapped from the file.

    Raises:
        InvalidWeightsError: the file is not a whole safetensors file.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise InvalidWeightsError(f"{path.name} is not a safetensors file, or is cut short")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise InvalidWeightsError(f"{path.name} has no readable header") from error
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = entry["data_offsets"]
            tensors[name] = data[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidWeightsError(f"{path.name} holds no usable {name}: {error}") from error
    return tensors


def build_encoder(
    tensors: Mapping[str, NDArray[Any]], shape: EncoderShape, *, is_int8: bool
) -> bytes:
    """A serialised ONNX model: int64[n, t] ids and mask -> float32[n, hidden], length 1.

    Args:
        tensors: weights under the names Hugging Face gives them, with or without "bert.".
        shape: sizes.
        is_int8: weights become 8-bit numbers, one scale per output channel (per row of the word
            table), and activations are quantised while it runs; 64 instead of 128 steps each way,
            since processors without VNNI would overflow with all of them.

    Raises:
        InvalidWeightsError: a tensor is missing or has another shape.
    """
    return _EncoderBuilder(tensors, shape, is_int8).build()


class _EncoderBuilder:
    def __init__(
        self, tensors: Mapping[str, NDArray[Any]], shape: EncoderShape, is_int8: bool
    ) -> None:
        self._tensors = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
        self._shape = shape
        self._is_int8 = is_int8
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def build(self) -> bytes:
        from onnx import TensorProto, helper

        hidden = self._shape.hidden
        state = self._embeddings()
        mask = self._node("Cast", ["attention_mask"], to=TensorProto.INT32)
        for layer in range(self._shape.layers):
            state = self._layer(state, mask, f"encoder.layer.{layer}.")
        self._pool(state)
        graph = helper.make_graph(
            self._nodes,
            "sentence-encoder",
            [
                helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["n", "t"]),
                helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["n", "t"]),
            ],
            [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["n", hidden])],
            self._constants,
        )
        model = helper.make_model(
            graph,
            producer_name="pointsman",
            ir_version=_IR_VERSION,
            opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(_FUSED, 1)],
        )
        serialised: bytes = model.SerializeToString()
        return serialised

    def _embeddings(self) -> str:
        hidden = self._shape.hidden
        words = self._tensor("embeddings.word_embeddings.weight")
        if words.ndim != 2 or words.shape[1] != hidden:
            raise InvalidWeightsError(f"the word table has shape {words.shape}")
        if self._is_int8:
            scales = np.maximum(np.abs(words).max(axis=1, keepdims=True) / 127.0, 1e-12)
            table = self._constant("words", np.rint(words / scales).astype(np.int8))
            rows = self._node("Gather", [table, "input_ids"])
            row_scales = self._constant("word_scales", scales.astype(np.float32))
            word = self._node(
                "Mul",
                [
                    self._node("Cast", [rows], to=1),
                    self._node("Gather", [row_scales, "input_ids"]),
                ],
            )
        else:
            word = self._node("Gather", [self._constant("words", words), "input_ids"])
        # Every token is of the first kind, so its vector is part of each position's.
        positions = self._tensor("embeddings.position_embeddings.weight")
        kinds = self._tensor("embeddings.token_type_embeddings.weight")
        length = self._node(
            "Slice",
            [
                self._node("Shape", ["input_ids"]),
                self._constant("one", np.array([1], dtype=np.int64)),
                self._constant("two", np.array([2], dtype=np.int64)),
            ],
        )
        position = self._node(
            "Slice",
            [
                self._constant("positions", positions + kinds[0]),
                self._constant("zero", np.array([0], dtype=np.int64)),
                length,
            ],
        )
        return self._node(
            "LayerNormalization",
            [self._node("Add", [word, position]), *self._norm("embeddings.LayerNorm.")],
            axis=-1,
            epsilon=self._shape.epsilon,
        )

    def _layer(self, state: str, mask: str, prefix: str) -> str:
        attention = f"{prefix}attention."
        kinds = ("query", "key", "value")
        weight = np.concatenate(
            [self._linear(f"{attention}self.{kind}", self._shape.hidden) for kind in kinds], axis=1
        )
        bias = np.concatenate([self._tensor(f"{attention}self.{kind}.bias") for kind in kinds])
        attend = self._attention_int8 if self._is_int8 else self._attention
        attended = attend(state, weight, bias, mask, attention)
        state = self._after(attended, state, f"{attention}output.")
        inner = f"{prefix}intermediate.dense"
        wide = self._product(state, self._linear(inner), self._tensor(f"{inner}.bias"), inner)
        wide = self._node("Gelu", [wide], domain=_FUSED)
        return self._after(wide, state, f"{prefix}output.")

    def _attention(
        self, state: str, weight: NDArray[Any], bias: NDArray[Any], mask: str, prefix: str
    ) -> str:
        # One product for the three is faster than three.
        projected = self._product(state, weight, bias, f"{prefix}qkv")
        sizes = self._constant(f"{prefix}sizes", np.array([self._shape.hidden] * 3, dtype=np.int64))
        query, key, value = self._nodes_out("Split", [projected, sizes], 3, axis=-1)
        return self._node(
            "MultiHeadAttention",
            [query, key, value, "", mask],
            domain=_FUSED,
            num_heads=self._shape.heads,
        )

    def _attention_int8(
        self, state: str, weight: NDArray[Any], bias: NDArray[Any], mask: str, prefix: str
    ) -> str:
        """The same from whole numbers; the operator projects into the order that it attends in."""
        whole, scale, zero = self._nodes_out("DynamicQuantizeLinear", [state], 3)
        name = f"{prefix}qkv"
        quantised, scales, zeros = self._quantised(weight, name)
        offset = self._constant(f"{name}.offset", bias)
        return self._node(
            "QAttention",
            [whole, quantised, offset, scale, scales, mask, zero, zeros],
            domain=_FUSED,
            num_heads=self._shape.heads,
        )

    def _after(self, inner: str, state: str, prefix: str) -> str:
        """Projection, then the sum with what went in, then normalisation."""
        dense = f"{prefix}dense"
        outcome = self._product(inner, self._linear(dense), self._tensor(f"{dense}.bias"), dense)
        # The fused sum-and-normalise operator takes six times as long as these two.
        return self._node(
            "LayerNormalization",
            [self._node("Add", [outcome, state]), *self._norm(f"{prefix}LayerNorm.")],
            axis=-1,
            epsilon=self._shape.epsilon,
        )

    def _pool(self, state: str) -> None:
        axis = self._constant("token_axis", np.array([1], dtype=np.int64))
        kept = self._node(
            "Unsqueeze",
            [
                self._node("Cast", ["attention_mask"], to=1),
                self._constant("last_axis", np.array([-1], dtype=np.int64)),
            ],
        )
        # The sum has the direction of the mean, and the length is made 1 anyway.
        total = self._node("ReduceSum", [self._node("Mul", [state, kept]), axis], keepdims=0)
        self._nodes.append(_node("LpNormalization", [total], ["embedding"], axis=-1, p=2))

    def _product(self, state: str, weight: NDArray[Any], bias: NDArray[Any], name: str) -> str:
        offset = self._constant(f"{name}.offset", bias)
        if not self._is_int8:
            product = self._node("MatMul", [state, self._constant(f"{name}.weight", weight)])
            return self._node("Add", [product, offset])
        return self._node(
            "DynamicQuantizeMatMul",
            [state, *self._quantised(weight, name), offset],
            domain=_FUSED,
        )

    def _quantised(self, weight: NDArray[Any], name: str) -> tuple[str, str, str]:
        """8-bit weights, their scales by output channel, and zeros."""
        scales = np.maximum(np.abs(weight).max(axis=0) / 64.0, 1e-12).astype(np.float32)
        return (
            self._constant(f"{name}.weight", np.rint(weight / scales).astype(np.int8)),
            self._constant(f"{name}.scales", scales),
            self._constant(f"{name}.zeros", np.zeros(scales.shape, dtype=np.int8)),
        )

    def _linear(self, prefix: str, outputs: int | None = None) -> NDArray[Any]:
        """float32[inputs, outputs]."""
        weight = self._tensor(f"{prefix}.weight")
        if weight.ndim != 2 or (outputs is not None and weight.shape[0] != outputs):
            raise InvalidWeightsError(f"{prefix}.weight has shape {weight.shape}")
        return np.ascontiguousarray(weight.T)

    def _norm(self, prefix: str) -> list[str]:
        return [
            self._constant(f"{prefix}{part}", self._tensor(f"{prefix}{part}"))
            for part in ("weight", "bias")
        ]

    def _tensor(self, name: str) -> NDArray[Any]:
        try:
            return np.asarray(self._tensors[name], dtype=np.float32)
        except KeyError:
            raise InvalidWeightsError(f"the weights hold no {name}") from None

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        from onnx import numpy_helper

        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def _node(self, kind: str, inputs: list[str], domain: str = "", **attributes: Any) -> str:
        return self._nodes_out(kind, inputs, 1, domain, **attributes)[0]

    def _nodes_out(
        self, kind: str, inputs: list[str], outputs: int, domain: str = "", **attributes: Any
    ) -> list[str]:
        names = [f"v{len(self._nodes)}_{index}" for index in range(outputs)]
        self._nodes.append(_node(kind, inputs, names, domain, **attributes))
        return names


def _node(
    kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any
) -> Any:
    from onnx import helper

    return helper.make_node(kind, inputs, outputs, domain=domain, **attributes)
