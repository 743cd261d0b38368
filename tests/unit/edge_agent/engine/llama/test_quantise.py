import asyncio
import fcntl
from pathlib import Path

import pytest

from edge_agent.engine.llama.quantise import quantise
from edge_agent.errors import ModelError, ModelFileError


def test_an_unknown_quantisation_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Q4_K_M"):
        asyncio.run(quantise(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q9_Z", 1))


def test_no_threads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="at least 1 thread"):
        asyncio.run(quantise(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q4_0", 0))


def test_a_missing_source_is_a_model_file_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="pull the model first"):
        asyncio.run(quantise(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q4_0", 1))


def test_a_web_page_is_no_source(tmp_path: Path) -> None:
    """M4."""
    source = tmp_path / "a.gguf"
    source.write_text("<!DOCTYPE html><title>404</title>")
    with pytest.raises(ModelFileError, match="no GGUF file"):
        asyncio.run(quantise(source, tmp_path / "b.gguf", "Q4_0", 1))


def test_a_missing_target_folder_is_a_model_file_error(tmp_path: Path) -> None:
    source = tmp_path / "a.gguf"
    source.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelFileError, match="cannot be written"):
        asyncio.run(quantise(source, tmp_path / "nowhere" / "b.gguf", "Q4_0", 1))


def test_a_target_that_another_process_makes_is_refused_and_left_alone(tmp_path: Path) -> None:
    source = tmp_path / "a.gguf"
    source.write_bytes(b"GGUF" + bytes(64))
    partial = tmp_path / ".b.gguf.quantising"
    with partial.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="Another process"):
            asyncio.run(quantise(source, tmp_path / "b.gguf", "Q4_0", 1))
        assert partial.exists()
