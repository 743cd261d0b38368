"""All that `edge-controller lab fit` learns, as one value that is saved and loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from controller.predictors.latency_regressor import FeatureLayout, LatencyPredictor
from controller.predictors.output_length import OutputLength
from controller.predictors.quality_table import QualityTable
from controller.predictors.query_classifier import QueryClassifier
from controller.predictors.reading_writing import ReadingWriting
from controller.predictors.tree_ensemble import ensemble_from_arrays, ensemble_from_lightgbm
from controller.storage.artifacts import Artifact, ArtifactError, load_artifact, save_artifact

KIND: Final = "drlm-predictors"
_FOREST: Final = "forest."
_LATENCY: Final = "latency"
_RATES: Final = "rates."
_RATE_ARRAYS: Final = ("reading", "writing", "class_tokens", "model_tokens")


@dataclass(frozen=True, slots=True)
class MeasuredLimits:
    """How long answers could get when they were measured.

    Attributes:
        max_tokens: the greatest length that was allowed; 0: there was no limit.
        cut_ratio: share of the answers that ran into their limit.
    """

    max_tokens: int = 0
    cut_ratio: float = 0.0


UNLIMITED: Final = MeasuredLimits()


@dataclass(frozen=True, slots=True)
class FittedPredictors:
    """The predictors that were fitted together, over the same classes.

    Attributes:
        classifier: embedding to class probabilities.
        quality: class and model to expected quality.
        output_length: class and model to expected tokens.
        latency: query, model and device to seconds.
        latency_model: LightGBM's text, from which `latency` was read.
        limits: of the answers that lengths and seconds were fitted on.
    """

    classifier: QueryClassifier
    quality: QualityTable
    output_length: OutputLength
    latency: LatencyPredictor
    latency_model: str
    limits: MeasuredLimits = UNLIMITED


def latency_from_lightgbm(
    text: str, layout: FeatureLayout, residual_sigma: float
) -> LatencyPredictor:
    """A predictor over LightGBM's text model.

    Raises:
        ValueError: the model cannot be evaluated, or was grown on other features.
    """
    trees, names = ensemble_from_lightgbm(text)
    if len(names) != len(layout.names):
        raise ValueError("the latency model was grown on other features; fit it again")
    return LatencyPredictor(layout, trees, residual_sigma)


def save_predictors(
    folder: Path, fitted: FittedPredictors, *, provenance: Mapping[str, Any]
) -> None:
    """Write an artifact folder.

    Args:
        folder: replaced as a whole.
        fitted: the predictors.
        provenance: sources with hashes, rows, command, held-out figures.

    Raises:
        ArtifactError: it cannot be written.
    """
    layout = fitted.latency.layout
    rates = layout.rates
    forest = fitted.classifier.forest.as_arrays()
    save_artifact(
        folder,
        Artifact(
            KIND,
            arrays={
                **{_FOREST + name: array for name, array in forest.items()},
                "correct": fitted.quality.correct,
                "answered": fitted.quality.answered,
                "length_expected": fitted.output_length.expected,
                "length_class_means": fitted.output_length.class_means,
                **({_RATES + name: getattr(rates, name) for name in _RATE_ARRAYS} if rates else {}),
            },
            texts={_LATENCY: fitted.latency_model},
            details={
                "classes": list(fitted.classifier.classes),
                "default_class": fitted.classifier.default_class,
                "confidence_threshold": fitted.classifier.confidence_threshold,
                "sharpness": fitted.classifier.sharpness,
                "models": list(fitted.quality.models),
                "families": list(layout.families),
                "kinds": list(layout.kinds),
                "rates": None
                if rates is None
                else {
                    "models": list(rates.models),
                    "kinds": list(rates.kinds),
                    "most_tokens": rates.most_tokens,
                },
                "residual_sigma": fitted.latency.residual_sigma,
                "max_tokens": fitted.limits.max_tokens,
                "cut_ratio": fitted.limits.cut_ratio,
            },
            provenance=provenance,
        ),
    )


def load_predictors(folder: Path) -> FittedPredictors:
    """The predictors of an artifact folder, its hashes checked.

    Raises:
        ArtifactError: the folder is absent, altered, of another schema, or inconsistent.
    """
    artifact = load_artifact(folder, KIND)
    try:
        described, arrays = artifact.details, artifact.arrays
        text = artifact.texts[_LATENCY]
        classes, models = tuple(described["classes"]), tuple(described["models"])
        layout = FeatureLayout(
            classes,
            tuple(described["families"]),
            tuple(described["kinds"]),
            _rates_of(described["rates"], arrays),
        )
        forest = {
            name.removeprefix(_FOREST): array
            for name, array in arrays.items()
            if name.startswith(_FOREST)
        }
        return FittedPredictors(
            classifier=QueryClassifier(
                classes,
                str(described["default_class"]),
                float(described["confidence_threshold"]),
                ensemble_from_arrays(forest),
                float(described["sharpness"]),
            ),
            quality=QualityTable(classes, models, arrays["correct"], arrays["answered"]),
            output_length=OutputLength(
                classes, models, arrays["length_expected"], arrays["length_class_means"]
            ),
            latency=latency_from_lightgbm(text, layout, float(described["residual_sigma"])),
            latency_model=text,
            limits=MeasuredLimits(int(described["max_tokens"]), float(described["cut_ratio"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder} is inconsistent ({error}); make it again") from error


def _rates_of(
    described: Mapping[str, Any] | None, arrays: Mapping[str, NDArray[Any]]
) -> ReadingWriting | None:
    if described is None:
        return None
    return ReadingWriting(
        tuple(described["models"]),
        tuple(described["kinds"]),
        **{name: arrays[_RATES + name] for name in _RATE_ARRAYS},
        most_tokens=int(described["most_tokens"]),
    )
