"""Prompt embeddings: one interface, onnxruntime behind it while serving.

Serving imports neither torch nor `onnx`. The model files come from `export_embedding_model`
(`edge-controller embedding export`).
"""

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from controller.storage.digests import file_digest

FloatArray = NDArray[np.float32]

EXPORT_COMMAND: Final = "edge-controller embedding export"

FLOAT_FILE: Final = "model.onnx"
INT8_FILE: Final = "model.int8.onnx"
TOKENIZER_FILE: Final = "tokenizer.json"
MANIFEST_FILE: Final = "manifest.json"
MANIFEST_VERSION: Final = 1

_PROMPTS_AT_ONCE: Final = 16
_LENGTH_RATIO: Final = 1.25
"""Prompts of similar length go through together, so that little of the work is padding."""


class EmbeddingUnavailableError(Exception):
    """No embedding model can be had here; its text says which command makes one."""


class EmbeddingBackend(Protocol):
    """Texts to directions in which similar texts lie close together.

    `embed` may be called from any thread, blocks, and gives a text the same vector wherever it
    stands in the batch, up to the backend's rounding.
    """

    @property
    def name(self) -> str:
        """The model, a slash and its precision."""
        ...

    @property
    def model(self) -> str:
        """The model alone; vectors of different models do not compare."""
        ...

    @property
    def dimension(self) -> int:
        """Numbers in one embedding."""
        ...

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """float32[n, dimension], each row of length 1; only the start of a long text counts."""
        ...


def default_folder() -> Path:
    """Where `export` puts the model: POINTSMAN_CACHE, else ~/.cache/pointsman, then embedding/."""
    cache = os.environ.get("POINTSMAN_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "pointsman") / "embedding"


class OnnxEmbedding:
    """all-MiniLM-L6-v2 on onnxruntime.

    Args:
        folder: as `export_embedding_model` fills it; None takes `default_folder()`.
        is_int8: False takes the float model, which is three to four times as slow.
        threads: of one call; None takes as many as there are cores.

    Raises:
        EmbeddingUnavailableError: a file is absent or not the one that the manifest names, or
            onnxruntime is missing.
    """

    def __init__(
        self, folder: Path | None = None, *, is_int8: bool = True, threads: int | None = None
    ) -> None:
        folder = folder or default_folder()
        manifest = _read_manifest(folder)
        model = _verified(folder, INT8_FILE if is_int8 else FLOAT_FILE, manifest)
        tokenizer = _verified(folder, TOKENIZER_FILE, manifest)
        try:
            import onnxruntime
            from tokenizers import Tokenizer
        except ImportError as error:
            raise EmbeddingUnavailableError(
                f"embeddings need {error.name}; install the extra `controller`"
            ) from error
        self._model = str(manifest["model"])
        self._name = f"{self._model}/{'int8' if is_int8 else 'float'}"
        self._dimension = int(manifest["dimension"])
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(tokenizer))
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(int(manifest["max_tokens"]))
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads or _usable_cores()
            # Threads that spin save a tenth of the time; when a call ends they stop, so that they
            # do not take the cores away from the policies.
            options.add_session_config_entry("session.intra_op.allow_spinning", "1")
            options.add_session_config_entry("session.force_spinning_stop", "1")
            # By its path: from bytes it would take 30 MB more.
            self._session: Any = onnxruntime.InferenceSession(
                str(model), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # both libraries raise bare Exception for a bad file
            raise EmbeddingUnavailableError(
                f"the embedding model in {folder} does not load ({error}); "
                f"make it again with `{EXPORT_COMMAND}`"
            ) from error

    @property
    def name(self) -> str:
        """The model and its precision."""
        return self._name

    @property
    def model(self) -> str:
        """The model alone."""
        return self._model

    @property
    def dimension(self) -> int:
        """Numbers in one embedding."""
        return self._dimension

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """float32[n, dimension], each row of length 1."""
        embeddings = np.zeros((len(texts), self._dimension), dtype=np.float32)
        # What is not text, such as half of a surrogate pair, cannot be tokenised.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(clean)]
        for part in _alike([len(ids) for ids in tokens]):
            shape = (len(part), max(len(tokens[index]) for index in part))
            ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
            for row, index in enumerate(part):
                ids[row, : len(tokens[index])] = tokens[index]
                mask[row, : len(tokens[index])] = 1
            feed = {"input_ids": ids, "attention_mask": mask}
            embeddings[part] = self._session.run(["embedding"], feed)[0]
        return embeddings


class CachedEmbedding:
    """A backend that remembers the prompts it embedded last.

    Args:
        backend: embeds what is not remembered.
        capacity: prompts remembered, 1.5 kB each.
    """

    def __init__(self, backend: EmbeddingBackend, capacity: int = 4096) -> None:
        if capacity < 1:
            raise ValueError("a cache remembers at least one prompt")
        self._backend = backend
        self._capacity = capacity
        self._known: OrderedDict[bytes, FloatArray] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0

    @property
    def name(self) -> str:
        """The backend's."""
        return self._backend.name

    @property
    def model(self) -> str:
        """The backend's."""
        return self._backend.model

    @property
    def dimension(self) -> int:
        """Numbers in one embedding."""
        return self._backend.dimension

    @property
    def hits(self) -> int:
        """Prompts that were found in memory."""
        return self._hits

    @property
    def misses(self) -> int:
        """Prompts that were."""
        return self._misses

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """float32[n, dimension]; each text is embedded once, and not at all when remembered."""
        # Digests, since prompts may be long and should not stay in memory.
        keys = [
            hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            for text in texts
        ]
        found: dict[bytes, FloatArray] = {}
        with self._lock:
            for key in keys:
                if key in self._known:
                    self._known.move_to_end(key)
                    found[key] = self._known[key]
                    self._hits += 1
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
        if missing:
            fresh = self._backend.embed(list(missing.values()))
            with self._lock:
                self._misses += len(missing)
                for key, embedding in zip(missing, fresh, strict=True):
                    found[key] = self._known[key] = embedding.copy()
                while len(self._known) > self._capacity:
                    self._known.popitem(last=False)
        if not keys:
            return np.zeros((0, self.dimension), dtype=np.float32)
        return np.stack([found[key] for key in keys])


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["version"]
    except FileNotFoundError as error:
        raise EmbeddingUnavailableError(
            f"there is no embedding model in {folder}; make one with `{EXPORT_COMMAND}`"
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EmbeddingUnavailableError(
            f"{path} cannot be read ({error}); make it again with `{EXPORT_COMMAND}`"
        ) from error
    if version != MANIFEST_VERSION:
        raise EmbeddingUnavailableError(
            f"{path} has version {version}, this controller reads {MANIFEST_VERSION}; "
            f"make it again with `{EXPORT_COMMAND}`"
        )
    return dict(manifest)


def _verified(folder: Path, name: str, manifest: dict[str, Any]) -> Path:
    path = folder / name
    try:
        digest = file_digest(path)
    except OSError as error:
        raise EmbeddingUnavailableError(
            f"{path} cannot be read ({error.strerror}); make it with `{EXPORT_COMMAND}`"
        ) from error
    if digest != manifest.get("sha256", {}).get(name):
        raise EmbeddingUnavailableError(
            f"{path} is not the file that {MANIFEST_FILE} names; "
            f"make it again with `{EXPORT_COMMAND}`"
        )
    return path


def _alike(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Positions in groups of at most `_PROMPTS_AT_ONCE` whose lengths differ little."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda position: lengths[position]):
        is_long = group and lengths[index] > _LENGTH_RATIO * lengths[group[0]] + 2
        if len(group) == _PROMPTS_AT_ONCE or is_long:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1
