"""The fitted predictors of a running controller: requests and a snapshot in, estimates out.

Everything here blocks and is called from threads; `request_manager` keeps it off the event loop.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controller.domain.cluster import ClusterSnapshot
from controller.domain.request import InferenceRequest
from controller.predictors.class_conditioned import ClassConditioned, ClassPredictions
from controller.predictors.fitted import FittedPredictors, load_predictors
from controller.routing.decision_memory import DecisionMemory
from controller.storage.artifacts import MANIFEST
from controller.storage.digests import file_digest

Embed = Callable[[Sequence[str]], NDArray[np.float32]]


class FittedPredictor:
    """Estimates by class; safe to call from several threads.

    Args:
        fitted: of `edge-controller lab fit`.
        embed: texts to float32[n, 384], by the model that they were fitted with.
        name: what they are called in accounts.
    """

    def __init__(self, fitted: FittedPredictors, embed: Embed, name: str) -> None:
        self.name = name
        self._conditioned = ClassConditioned(fitted)
        self._embed = embed

    def predict(
        self,
        requests: Sequence[InferenceRequest],
        snapshot: ClusterSnapshot,
        memory: DecisionMemory,
    ) -> ClassPredictions:
        """Estimate a batch.

        Args:
            requests: R.
            snapshot: whose destinations are the columns.
            memory: keeps how this fleet meets the predictors.
        """
        texts = [request.text for request in requests]
        limits = np.array([request.sampling.max_tokens for request in requests], dtype=np.float64)
        return self._conditioned.predict(texts, self._embed(texts), limits, snapshot, memory)


def open_fitted_predictor(folder: Path, embed: Embed) -> FittedPredictor:
    """The predictors of a folder, named by it and by what is in it.

    Raises:
        ArtifactError: the folder does not load.
    """
    fitted = load_predictors(folder)
    return FittedPredictor(fitted, embed, f"{folder.name} {file_digest(folder / MANIFEST)[:12]}")
