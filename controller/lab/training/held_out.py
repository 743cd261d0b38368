"""How good predictors are on queries that they were not grown on."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.lab.training.measurement_table import TrainingTable
from controller.predictors.fitted import FittedPredictors
from controller.predictors.quality_table import CORRECT_FROM, QualityTable
from controller.predictors.query_classifier import QueryClassifier

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def determination(measured: FloatArray, foreseen: FloatArray) -> float:
    """R2: the share of the spread that is foreseen; 0 where nothing is spread."""
    spread = float(np.sum((measured - measured.mean()) ** 2))
    return 1.0 - float(np.sum((measured - foreseen) ** 2)) / spread if spread > 0 else 0.0


def classifier_figures(
    classifier: QueryClassifier,
    embeddings: NDArray[np.float32],
    labels: IntArray,
    held_out: NDArray[np.bool_],
) -> dict[str, Any]:
    """Accuracy and confusion; the confidence threshold's fall-back is not counted as an answer.

    Args:
        classifier: on trial.
        embeddings: float32[Q, 384].
        labels: int64[Q]; true classes.
        held_out: bool[Q].
    """
    raw = classifier.raw_probabilities(embeddings[held_out])
    said, truth = raw.argmax(axis=1), labels[held_out]
    confusion = np.zeros((len(classifier.classes),) * 2, dtype=np.int64)
    np.add.at(confusion, (truth, said), 1)
    return {
        "accuracy": float(np.mean(said == truth)),
        "unclear_ratio": float(np.mean(raw.max(axis=1) < classifier.confidence_threshold)),
        "sharpness": classifier.sharpness,
        "classes": list(classifier.classes),
        "confusion": confusion.tolist(),
        "default_class": classifier.default_class,
    }


def _log_loss(probability: FloatArray, correct: NDArray[np.bool_]) -> float:
    return float(-np.mean(np.log(np.where(correct, probability, 1.0 - probability))))


def quality_figures(
    table: TrainingTable, quality: QualityTable, served: FloatArray, rows: NDArray[np.bool_]
) -> dict[str, Any]:
    """Log loss of the table with the classes as they will be served, and without classes.

    Args:
        table: measurements.
        quality: on trial.
        served: float64[Q, C]; class probabilities.
        rows: bool[n]; those held out.
    """
    graded = rows & ~np.isnan(table.score_ratio)
    if not graded.any():
        return {"log_loss": None, "log_loss_without_classes": None, "graded_answers": 0}
    correct = table.score_ratio[graded] >= CORRECT_FROM
    foreseen = quality.predict(served)[table.query[graded], table.model[graded]]
    overall = (quality.correct.sum(axis=0) + 1.0) / (quality.answered.sum(axis=0) + 2.0)
    return {
        "log_loss": _log_loss(foreseen, correct),
        "log_loss_without_classes": _log_loss(overall[table.model[graded]], correct),
        "graded_answers": int(graded.sum()),
    }


def length_figures(
    table: TrainingTable, fitted: FittedPredictors, served: FloatArray, rows: NDArray[np.bool_]
) -> dict[str, Any]:
    """How far the expected length is from the measured one.

    Args:
        table: measurements.
        fitted: on trial.
        served: float64[Q, C]; class probabilities.
        rows: bool[n]; those held out.
    """
    known = rows & ~np.isnan(table.completion_tokens)
    if not known.any():
        return {"mean_absolute_error_tokens": None, "mean_tokens": None}
    foreseen = fitted.output_length.predict(served)[table.query[known], table.model[known]]
    measured = table.completion_tokens[known]
    return {
        "mean_absolute_error_tokens": float(np.abs(foreseen - measured).mean()),
        "mean_tokens": float(measured.mean()),
    }
