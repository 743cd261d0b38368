"""all-MiniLM-L6-v2 by sentence-transformers: what the served embeddings are compared with.

Needs the extra `train` (it brings torch); serving never imports this module.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.quality.embedding import EmbeddingUnavailableError


class SentenceTransformersEmbedding:
    """The reference backend.

    Args:
        weights: the folder of the model as published (model.safetensors, config.json, modules.json
            and what they name); nothing is fetched.

    Raises:
        EmbeddingUnavailableError: sentence-transformers is missing, or the folder holds no model.
    """

    def __init__(self, weights: Path) -> None:
        try:
            library = importlib.import_module("sentence_transformers")
        except ImportError as error:
            raise EmbeddingUnavailableError(
                f"the reference embedding needs {error.name}; install the extra `train`"
            ) from error
        if not (weights / "modules.json").is_file():
            raise EmbeddingUnavailableError(
                f"{weights} holds no sentence-transformers model; name the folder of modules.json"
            )
        try:
            self._model: Any = library.SentenceTransformer(
                str(weights), device="cpu", local_files_only=True
            )
            self._dimension = int(np.asarray(self._model.encode("", show_progress_bar=False)).size)
        except (OSError, ValueError, KeyError) as error:
            raise EmbeddingUnavailableError(
                f"the model in {weights} does not load: {error}"
            ) from error

    @property
    def name(self) -> str:
        """The model and its precision."""
        return f"{self.model}/reference"

    @property
    def model(self) -> str:
        """The model alone."""
        return "all-MiniLM-L6-v2"

    @property
    def dimension(self) -> int:
        """Numbers in one embedding."""
        return self._dimension

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32[n, dimension], each row of length 1."""
        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        found = self._model.encode(clean, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(found, dtype=np.float32)
