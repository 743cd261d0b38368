import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_agent.engine.llama.model_files import describe_model_file
from edge_agent.errors import ModelFileError


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def string_entry(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", 8) + text(value)


def integer_entry(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def strings_entry(key: str, values: list[str]) -> bytes:
    head = text(key) + struct.pack("<IIQ", 9, 8, len(values))
    return head + b"".join(text(value) for value in values)


def tensor(name: str, dimensions: list[int], kind: int, offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", d) for d in dimensions)
    return (
        text(name) + struct.pack("<I", len(dimensions)) + sizes + struct.pack("<IQ", kind, offset)
    )


def gguf(
    entries: list[bytes], tensors: list[bytes], data_bytes: int = 0, version: int = 3
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data_bytes)


ENTRIES = [
    string_entry("general.architecture", "llama"),
    string_entry("general.name", "Tiny"),
    string_entry("general.size_label", "1K"),
    integer_entry("general.file_type", 2),
    integer_entry("llama.context_length", 512),
    integer_entry("llama.block_count", 3),
    integer_entry("llama.embedding_length", 64),
    integer_entry("llama.attention.head_count", 4),
    integer_entry("llama.attention.head_count_kv", 2),
    strings_entry("tokenizer.ggml.tokens", [f"token{i}" for i in range(1500)]),
    string_entry("tokenizer.chat_template", "{{ messages }}"),
]
TENSORS = [tensor("a", [64, 10], 0, 0), tensor("b", [64], 2, 2560)]
WHOLE = gguf(ENTRIES, TENSORS, data_bytes=2560 + 36)


def test_a_whole_file_is_described(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(WHOLE)
    model = describe_model_file(path)
    assert model.path == path
    assert model.size_bytes == len(WHOLE)
    assert (model.version, model.name, model.architecture) == (3, "Tiny", "llama")
    assert (model.size_label, model.quantisation) == ("1K", "Q4_0")
    assert model.parameters == 64 * 10 + 64
    assert (model.context_length, model.block_count, model.embedding_length) == (512, 3, 64)
    assert model.vocabulary_size == 1500
    # 3 layers x 2 heads x (16 + 16) wide x 2 bytes.
    assert model.kv_bytes_per_token == 384
    assert model.has_chat_template


def test_what_a_file_does_not_say_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    path.write_bytes(gguf([], []))
    model = describe_model_file(path)
    assert model.name is None
    assert model.architecture is None
    assert model.quantisation is None
    assert model.context_length is None
    assert model.kv_bytes_per_token is None
    assert model.parameters == 0
    assert not model.has_chat_template


@given(kept=st.integers(0, len(WHOLE) - 1))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_is_cut_short_anywhere_is_refused(tmp_path: Path, kept: int) -> None:
    """M6."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(WHOLE[:kept])
    with pytest.raises(ModelFileError, match="pull"):
        describe_model_file(path)


@given(at=st.integers(0, 900), byte=st.integers(0, 255))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_raises_nothing_else(tmp_path: Path, at: int, byte: int) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :])
    try:
        model = describe_model_file(path)
    except ModelFileError:
        return
    assert model.size_bytes == len(WHOLE)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html><title>404</title></html>", "web page"),
        (b"\n  <html><body>Sign in</body></html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"tjgg" + bytes(60), "older than GGUF"),
        (b"GGUF\x03", "cut short"),
        (bytes(64), "no GGUF file"),
        (gguf([], [], version=1), "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99), "damaged"),
    ],
)
def test_another_kind_of_file_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    """M4."""
    path = tmp_path / "impostor.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=says):
        describe_model_file(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="pull the model first"):
        describe_model_file(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="folder"):
        describe_model_file(tmp_path)
