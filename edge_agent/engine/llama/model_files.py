"""Describes and hashes GGUF files without llama.cpp.

Only the header is read, so a file of many gigabytes is described in a fraction of a second.
Source of the layout: the GGUF specification, versions 2 and 3, in the ggml repository.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_agent.errors import ModelFileError

GGUF_MAGIC: Final = b"GGUF"
_SUPPORTED_VERSIONS: Final = (2, 3)
_HASH_BLOCK_BYTES: Final = 1 << 20
_MAX_NESTING: Final = 4

_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING: Final = 8
_ARRAY: Final = 9
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")

# Arrays up to here are kept (layer-wise head counts); longer ones (vocabularies) are only counted.
_KEPT_ARRAY_ITEMS: Final = 1024

# ggml tensor type -> (weights in a block, bytes of a block), from ggml's type traits.
_BLOCKS: Final = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
}

# general.file_type -> name, from llama.cpp's enum llama_ftype.
_FILE_TYPES: Final = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
}

MetadataValue = int | float | bool | str | list["MetadataValue"] | None


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What a GGUF file says about itself; None where it says nothing.

    Attributes:
        size_bytes: of the file.
        version: of the GGUF format.
        name: "general.name", for people.
        architecture: such as "llama" or "gemma3".
        size_label: such as "135M".
        quantisation: such as "Q4_K_M".
        parameters: number of weights, counted over the tensors.
        context_length: longest context the model was trained for.
        block_count: layers.
        embedding_length: width of the residual stream.
        vocabulary_size: tokens in the vocabulary.
        kv_bytes_per_token: of a 16-bit KV cache, over all layers; an upper bound for models whose
            layers look at a sliding window only.
        has_chat_template: the file carries one; whether it can be used is for the engine to say.
    """

    path: Path
    size_bytes: int
    version: int
    name: str | None
    architecture: str | None
    size_label: str | None
    quantisation: str | None
    parameters: int
    context_length: int | None
    block_count: int | None
    embedding_length: int | None
    vocabulary_size: int | None
    kv_bytes_per_token: int | None
    has_chat_template: bool


def describe_model_file(path: Path) -> ModelFile:
    """Read the header of a GGUF file and check that all of its weights are there.

    Blocks for as long as the disk needs for the header, some megabytes.

    Raises:
        ModelFileError: missing, unreadable, cut short, or another kind of file; says which.
    """
    try:
        with path.open("rb") as file:
            head = file.read(512)
            if len(head) < 24 or head[:4] != GGUF_MAGIC:
                raise ModelFileError(f"{path} {_what_it_is(head)}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Reader(path, view).describe()
    except FileNotFoundError:
        raise ModelFileError(f"There is no file {path}; pull the model first.") from None
    except IsADirectoryError:
        raise ModelFileError(f"{path} is a folder; name the GGUF file in it.") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}.") from error


def _what_it_is(head: bytes) -> str:
    """Name the usual impostors, so that the message says what to do."""
    start = head.lstrip().lower()
    if not head:
        return "is empty; pull the model again."
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page, not a GGUF file: the download met an error page; pull it again."
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights; fetch the real file."
    if head.startswith(b"PK\x03\x04"):
        return "is a zip archive (PyTorch weights?), not a GGUF file; convert it first."
    if head.startswith(GGUF_MAGIC):
        return "is cut short within its header; pull the model again."
    if head.startswith((b"lmgg", b"fmgg", b"tjgg", b"algg")):
        return "is in a format older than GGUF that llama.cpp no longer reads; pull a GGUF file."
    return f"is no GGUF file: it starts with {head[:4]!r}; pull the model again."


class _Reader:
    """Walks one header; every read is checked against the end of the file."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path = path
        self.view = view
        self.size = len(view)
        self.offset = 4

    def describe(self) -> ModelFile:
        version = self._u32()
        if version not in _SUPPORTED_VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _SUPPORTED_VERSIONS:
                raise self._error("is in big-endian order, which llama.cpp does not read here")
            raise self._error(f"has GGUF version {version}; versions 2 and 3 can be read")
        tensor_count = self._u64()
        metadata = {}
        for _ in range(self._u64()):
            key = self._string()
            metadata[key] = self._value(self._u32())
        parameters = self._check_tensors(tensor_count, metadata)
        architecture = _text(metadata.get("general.architecture"))
        prefix = f"{architecture}."
        file_type = _integer(metadata.get("general.file_type"))
        return ModelFile(
            path=self.path,
            size_bytes=self.size,
            version=version,
            name=_text(metadata.get("general.name")),
            architecture=architecture,
            size_label=_text(metadata.get("general.size_label")),
            quantisation=None if file_type is None else _FILE_TYPES.get(file_type),
            parameters=parameters,
            context_length=_integer(metadata.get(prefix + "context_length")),
            block_count=_integer(metadata.get(prefix + "block_count")),
            embedding_length=_integer(metadata.get(prefix + "embedding_length")),
            vocabulary_size=_length(metadata.get("tokenizer.ggml.tokens")),
            kv_bytes_per_token=_kv_bytes_per_token(metadata, prefix),
            has_chat_template=bool(_text(metadata.get("tokenizer.chat_template"))),
        )

    def _error(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} {what}; pull the model again.")

    def _take(self, count: int) -> int:
        """Step over `count` bytes that must be there; the offset where they start."""
        start = self.offset
        if count > self.size - start:
            raise self._error(f"is cut short: its header goes on after its {self.size} bytes")
        self.offset = start + count
        return start

    def _u32(self) -> int:
        return int(_U32.unpack_from(self.view, self._take(4))[0])

    def _u64(self) -> int:
        return int(_U64.unpack_from(self.view, self._take(8))[0])

    def _string(self) -> str:
        length = self._u64()
        start = self._take(length)
        return self.view[start : start + length].decode("utf-8", errors="replace")

    def _value(self, kind: int, depth: int = 0) -> MetadataValue:
        """One value; of a long array only its length, since nobody here wants a vocabulary."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind = self._u32()
            count = self._u64()
            if depth >= _MAX_NESTING:
                raise self._error("is damaged: its metadata is nested too deep")
            if count <= _KEPT_ARRAY_ITEMS:
                return [self._value(item_kind, depth + 1) for _ in range(count)]
            if item_kind in _SCALARS:
                self._take(count * _SCALARS[item_kind].size)
            else:
                for _ in range(count):
                    if item_kind == _STRING:
                        self._take(self._u64())
                    else:
                        self._value(item_kind, depth + 1)
            return count
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self._error(f"is damaged: its metadata has a value of unknown type {kind}")
        value: int | float | bool = scalar.unpack_from(self.view, self._take(scalar.size))[0]
        return value

    def _check_tensors(self, count: int, metadata: dict[str, MetadataValue]) -> int:
        """Count the weights and see that the last tensor's bytes are in the file."""
        parameters = 0
        end = 0
        for _ in range(count):
            self._take(self._u64())
            dimensions = self._u32()
            if dimensions > 8:
                raise self._error("is damaged: a tensor has more than 8 dimensions")
            weights = math.prod(self._u64() for _ in range(dimensions))
            kind = self._u32()
            offset = self._u64()
            parameters += weights
            weights_in_block, block_bytes = _BLOCKS.get(kind, (1, 0))
            end = max(end, offset + weights // weights_in_block * block_bytes)
        alignment = _integer(metadata.get("general.alignment")) or 32
        data_start = -(-self.offset // alignment) * alignment
        missing = data_start + end - self.size
        if count and missing > 0:
            raise self._error(f"is cut short: {missing} bytes of its weights are missing")
        return parameters


def _text(value: MetadataValue) -> str | None:
    return value if isinstance(value, str) else None


def _length(value: MetadataValue) -> int | None:
    return len(value) if isinstance(value, list) else _integer(value)


def _integer(value: MetadataValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _kv_bytes_per_token(metadata: dict[str, MetadataValue], prefix: str) -> int | None:
    """Bytes that one token takes in a 16-bit KV cache: (k + v) widths x heads x layers x 2."""
    layers = _integer(metadata.get(prefix + "block_count"))
    width = _integer(metadata.get(prefix + "embedding_length"))
    heads = metadata.get(prefix + "attention.head_count")
    kv_heads = metadata.get(prefix + "attention.head_count_kv", heads)
    if layers is None or width is None or kv_heads is None:
        return None
    if isinstance(kv_heads, list):
        total_kv_heads = sum(h for h in kv_heads if isinstance(h, int))
    elif isinstance(kv_heads, int):
        total_kv_heads = kv_heads * layers
    else:
        return None
    if isinstance(heads, list):
        heads = max((h for h in heads if isinstance(h, int)), default=None)
    if not isinstance(heads, int) or heads < 1:
        return None
    key_width = _integer(metadata.get(prefix + "attention.key_length")) or width // heads
    value_width = _integer(metadata.get(prefix + "attention.value_length")) or width // heads
    return 2 * total_kv_heads * (key_width + value_width)
