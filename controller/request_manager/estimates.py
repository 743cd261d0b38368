"""What a batch is decided by: estimates of whoever knows best, each with its source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog
from numpy.typing import ArrayLike

from controller.domain.cluster import ClusterSnapshot
from controller.domain.request import InferenceRequest
from controller.predictors.class_conditioned import ClassPredictions
from controller.predictors.fitted_serving import FittedPredictor
from controller.quality.predictor import (
    Predictions,
    QualityPredictor,
    length_prior,
    source_label,
)
from controller.routing.decision_memory import DecisionMemory
from controller.routing.formulation import FormulatedBatch, formulate
from controller.routing.problem import FloatArray, Normalisation

log = structlog.get_logger()

CLASS_TABLE: Final = "class table"
FITTED: Final = "fitted"


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """Of R requests at D destinations; None leaves a term to `formulate`.

    Attributes:
        quality, output_tokens, median_tokens: float64[R, D].
        inference_seconds: float64[R, D]; NaN where the calibration says it.
        class_quality: float64[R, D]; of policies that decide by the class alone.
        similar: what similar prompts say, where the fitted predictors say nothing.
        told: what the fitted predictors say.
        predictors: their name; empty when there are none.
    """

    quality: FloatArray | None = None
    output_tokens: FloatArray | None = None
    median_tokens: FloatArray | None = None
    inference_seconds: FloatArray | None = None
    class_quality: FloatArray | None = None
    similar: Predictions | None = None
    told: ClassPredictions | None = None
    predictors: str = ""

    def formulated(
        self,
        requests: Sequence[InferenceRequest],
        snapshot: ClusterSnapshot,
        weights: ArrayLike,
        normalisation: Normalisation = Normalisation.PAYOFF,
        memory: DecisionMemory | None = None,
        *,
        marginal_energy_only: bool = False,
    ) -> FormulatedBatch:
        """The problem that these estimates make; raises as `formulate` does."""
        return formulate(
            requests,
            snapshot,
            weights,
            normalisation,
            quality=self.quality,
            output_tokens=self.output_tokens,
            median_tokens=self.median_tokens,
            inference_seconds=self.inference_seconds,
            class_quality=self.class_quality,
            memory=memory,
            marginal_energy_only=marginal_energy_only,
        )

    def query_class(self, request: int) -> str:
        """What the classifier says of a request; empty without one."""
        return self.told.classes[request] if self.told else ""

    def quality_source(self, request: int, column: int, otherwise: str) -> str:
        """Where a quality comes from, in words; `otherwise` when the destination said it."""
        if self.told is not None and not np.isnan(self.told.quality[request, column]):
            return CLASS_TABLE
        if self.similar is not None:
            return source_label(int(self.similar.quality_source[request, column]))
        return otherwise

    def quality_count(self, request: int, column: int, otherwise: int) -> int:
        """Outcomes behind a quality; 0 for one of a class table, which does not tell."""
        if self.told is not None and not np.isnan(self.told.quality[request, column]):
            return 0
        if self.similar is not None:
            return int(self.similar.quality_count[request, column])
        return otherwise

    def latency_source(self, request: int, column: int) -> str:
        """Where the seconds come from, and why not from the fit; empty without fitted ones."""
        if self.told is None:
            return ""
        if not np.isnan(self.told.inference_seconds[request, column]):
            return FITTED
        gap = self.told.gaps_of_requests[request] or self.told.gaps_of_destinations[column]
        return f"calibration: {gap}"


def estimate(
    requests: Sequence[InferenceRequest],
    snapshot: ClusterSnapshot,
    predictor: QualityPredictor | None,
    fitted: FittedPredictor | None,
    memory: DecisionMemory,
) -> Estimates:
    """Ask both predictors; one that fails is left out, since a batch has to go somewhere.

    Args:
        requests: R.
        snapshot: whose D destinations are the columns.
        predictor: of quality and length, from similar prompts.
        fitted: of quality, length and seconds, by class: goes before the other.
        memory: what earlier decisions have read of this fleet.
    """
    similar = told = None
    if predictor is not None:
        try:
            similar = predictor.predict(
                requests, snapshot.destinations, memory.answer_lengths(snapshot)
            )
        except Exception:
            log.exception("quality.not_predicted", requests=len(requests))
    if fitted is not None:
        try:
            told = fitted.predict(requests, snapshot, memory)
        except Exception:
            log.exception("classes.not_predicted", requests=len(requests))
    name = fitted.name if fitted is not None and told is not None else ""
    return combined(requests, snapshot, similar, told, memory, name)


def combined(
    requests: Sequence[InferenceRequest],
    snapshot: ClusterSnapshot,
    similar: Predictions | None,
    told: ClassPredictions | None,
    memory: DecisionMemory,
    predictors: str = "",
) -> Estimates:
    """The fitted predictors' estimates where they are known, the others elsewhere."""
    if told is None:
        if similar is None:
            return Estimates()
        return Estimates(
            similar.quality, similar.output_tokens, similar.median_tokens, similar=similar
        )
    quality, mean, median = told.quality, told.output_tokens, told.output_tokens
    if np.isnan(quality).any() or np.isnan(mean).any():
        others = _otherwise(requests, snapshot, similar, memory)
        quality, mean, median = (
            np.where(np.isnan(known), other, known)
            for known, other in zip((quality, mean, median), others, strict=True)
        )
    return Estimates(
        quality=quality,
        output_tokens=mean,
        median_tokens=median,
        inference_seconds=told.inference_seconds,
        class_quality=quality,
        similar=similar,
        told=told,
        predictors=predictors,
    )


def _otherwise(
    requests: Sequence[InferenceRequest],
    snapshot: ClusterSnapshot,
    similar: Predictions | None,
    memory: DecisionMemory,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Quality, mean and median length without the fitted predictors."""
    if similar is not None:
        return similar.quality, similar.output_tokens, similar.median_tokens
    limits = np.array([request.sampling.max_tokens for request in requests], dtype=np.float64)
    prior = length_prior(memory.answer_lengths(snapshot), limits)
    own = np.array([destination.mean_quality_ratio for destination in snapshot.destinations])
    return own, prior.mean, prior.median
