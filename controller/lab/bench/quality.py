"""Quality estimates against outcomes that they have not seen."""

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.lab.bench.outcomes import DataMissingError, MadeOutcomes, load_outcomes
from controller.quality.embedding import EmbeddingBackend
from controller.quality.neighbour_lengths import LengthPrior, answer_lengths
from controller.quality.neighbours import (
    PAPER_NEIGHBOURS,
    Evidence,
    NeighbourTarget,
    Shrinkage,
    paper_quality,
    shrunk_quality,
)
from controller.quality.store import QualityStore, prompt_digest
from controller.quality.store_contents import StoreContents

FloatArray = NDArray[np.float64]

LOG_LOSS_MARGIN: Final = 0.01
"""Estimates are moved this far away from 0 and 1 before their logarithm, in every form alike."""

CALIBRATION_BINS: Final = 10
_PROMPTS_AT_ONCE: Final = 256
_UNPROFILED_QUALITY: Final = 0.5


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Estimates of one tenth of the range, and what came of them."""

    estimates: int
    mean_estimate: float
    observed_ratio: float


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One form of the estimate on the held-out prompts.

    Attributes:
        form: "destination-mean", "paper" (Eq. 3) or "ours".
        brier: mean squared error, over prompts and models.
        log_loss: mean negative log likelihood, estimates kept `LOG_LOSS_MARGIN` from 0 and 1.
        argmax_accuracy: share answered well when the model of the greatest estimate answers.
        best_single_accuracy: of the one model that does best on the held-out prompts.
        calibration_error: mean distance of a bin's estimate from what came of it, by its size.
        calibration: the bins that have estimates.
        length_error_ratio: mean absolute error of the predicted answer length over the mean length;
            None for the paper's form, which predicts none.
    """

    form: str
    brier: float
    log_loss: float
    argmax_accuracy: float
    best_single_accuracy: float
    calibration_error: float
    calibration: tuple[CalibrationBin, ...]
    length_error_ratio: float | None


@dataclass(frozen=True, slots=True)
class QualityEvaluation:
    """All forms on one data set."""

    data: str
    embedding: str
    models: int
    profiled_prompts: int
    held_out_prompts: int
    rows: tuple[QualityRow, ...]


def evaluate(
    folder: Path,
    backend: EmbeddingBackend,
    *,
    shrinkage: Shrinkage | None = None,
    embeddings_file: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> QualityEvaluation:
    """Profile a part of a published outcome table, then judge the estimates for the rest.

    Embedding takes a few minutes for 12,000 prompts.

    Args:
        folder: of the outcome table; see `load_outcomes`.
        backend: embeds the prompts.
        shrinkage: of ours.
        embeddings_file: a .npz file that embeddings are read from when they are of these prompts
            and this backend, else written to.
        say: called with a line about progress.

    Raises:
        DataMissingError: the folder holds no outcome table.
    """
    table = load_outcomes(folder)
    embeddings = _embedded(table, backend, embeddings_file, say)
    return evaluate_table(table, embeddings, backend.name, shrinkage)


def evaluate_table(
    table: MadeOutcomes,
    embeddings: NDArray[np.float32],
    embedding_name: str,
    shrinkage: Shrinkage | None = None,
) -> QualityEvaluation:
    """Judge the estimates on an outcome table.

    Args:
        table: the outcomes.
        embeddings: float32[P, dimension] of its prompts.
        embedding_name: goes into the result.
        shrinkage: of ours.

    Raises:
        DataMissingError: nothing is profiled or nothing held out.
    """
    if not (len(table.profiled) and len(table.held_out)):
        raise DataMissingError(f"{table.name} leaves no prompt to profile or to judge")
    settings = shrinkage or Shrinkage()
    store = _profiled_store(table, embeddings)
    targets = [NeighbourTarget(model, model, _UNPROFILED_QUALITY) for model in table.models]
    held_out = table.held_out
    parts: dict[str, list[FloatArray]] = {"destination-mean": [], "paper": [], "ours": []}
    lengths: dict[str, list[FloatArray]] = {"destination-mean": [], "ours": []}
    neighbours = max(settings.neighbours, PAPER_NEIGHBOURS)
    for start in range(0, len(held_out), _PROMPTS_AT_ONCE):
        rows = held_out[start : start + _PROMPTS_AT_ONCE]
        evidence = store.evidence(embeddings[rows], targets, neighbours)
        shape = (len(rows), len(targets))
        parts["destination-mean"].append(np.broadcast_to(evidence.mean, shape))
        parts["paper"].append(paper_quality(evidence).value)
        parts["ours"].append(shrunk_quality(evidence, settings).value)
        lengths["destination-mean"].append(np.broadcast_to(evidence.mean_tokens, shape))
        lengths["ours"].append(_lengths(evidence, settings))
    outcomes = table.scores[held_out].astype(np.float64)
    tokens = table.output_tokens[held_out].astype(np.float64)
    return QualityEvaluation(
        data=table.name,
        embedding=embedding_name,
        models=len(table.models),
        profiled_prompts=len(table.profiled),
        held_out_prompts=len(held_out),
        rows=tuple(
            _row(
                form,
                np.concatenate(estimates),
                outcomes,
                _length_error(np.concatenate(lengths[form]), tokens) if form in lengths else None,
            )
            for form, estimates in parts.items()
        ),
    )


def evaluation_as_json(evaluation: QualityEvaluation) -> dict[str, Any]:
    """Plain values, with the rows under the names of their forms."""
    plain = asdict(evaluation)
    plain["rows"] = {row.form: asdict(row) for row in evaluation.rows}
    return plain


def brier_score(estimates: FloatArray, outcomes: FloatArray) -> float:
    """Mean squared distance of estimates from outcomes, 0 (best) to 1."""
    return float(np.square(estimates - outcomes).mean())


def log_loss(estimates: FloatArray, outcomes: FloatArray) -> float:
    """Mean negative log likelihood of outcomes (fractions count as that share of each)."""
    kept = np.clip(estimates, LOG_LOSS_MARGIN, 1.0 - LOG_LOSS_MARGIN)
    return float(-(outcomes * np.log(kept) + (1.0 - outcomes) * np.log1p(-kept)).mean())


def calibration_of(estimates: FloatArray, outcomes: FloatArray) -> tuple[CalibrationBin, ...]:
    """Bins of equal width; those without estimates are left out."""
    bins = np.minimum((estimates * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    return tuple(
        CalibrationBin(
            estimates=int((bins == index).sum()),
            mean_estimate=float(estimates[bins == index].mean()),
            observed_ratio=float(outcomes[bins == index].mean()),
        )
        for index in range(CALIBRATION_BINS)
        if (bins == index).any()
    )


def calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """Mean distance between estimate and outcome, each bin by its number of estimates."""
    total = sum(found.estimates for found in bins)
    distance = sum(f.estimates * abs(f.mean_estimate - f.observed_ratio) for f in bins)
    return distance / total


def _row(
    form: str, estimates: FloatArray, outcomes: FloatArray, length_error: float | None
) -> QualityRow:
    bins = calibration_of(estimates, outcomes)
    answered = outcomes[np.arange(len(outcomes)), estimates.argmax(axis=1)]
    return QualityRow(
        form=form,
        brier=brier_score(estimates, outcomes),
        log_loss=log_loss(estimates, outcomes),
        argmax_accuracy=float(answered.mean()),
        best_single_accuracy=float(outcomes.mean(axis=0).max()),
        calibration_error=calibration_error(bins),
        calibration=bins,
        length_error_ratio=length_error,
    )


def _lengths(evidence: Evidence, settings: Shrinkage) -> FloatArray:
    shape = (len(evidence.similarity), len(evidence.mean_tokens))
    typical = np.where(
        np.isnan(evidence.mean_tokens), np.nanmean(evidence.mean_tokens), evidence.mean_tokens
    )
    means = np.broadcast_to(typical, shape)
    unlimited = np.full(shape[0], np.inf)
    return answer_lengths(evidence, unlimited, LengthPrior(means, means, typical), settings).mean


def _length_error(predicted: FloatArray, tokens: FloatArray) -> float:
    return float(np.nanmean(np.abs(predicted - tokens)) / np.nanmean(tokens))


def _profiled_store(table: MadeOutcomes, embeddings: NDArray[np.float32]) -> QualityStore:
    # Two prompts of one text would be one prompt.
    first = {prompt_digest(table.prompts[row]): int(row) for row in table.profiled[::-1]}
    rows = np.array(sorted(first.values()), dtype=np.int64)
    digests = np.array(
        [np.frombuffer(prompt_digest(table.prompts[row]), dtype=np.uint8) for row in rows]
    )
    scores, tokens = table.scores[rows], table.output_tokens[rows]
    return QualityStore.from_contents(
        StoreContents(
            digests=digests,
            embeddings=embeddings[rows].astype(np.float16),
            destinations=table.models,
            models=table.models,
            scores=scores,
            score_counts=(~np.isnan(scores)).astype(np.uint16),
            tokens=tokens,
            token_counts=(~np.isnan(tokens)).astype(np.uint16),
        )
    )


def _embedded(
    table: MadeOutcomes,
    backend: EmbeddingBackend,
    file: Path | None,
    say: Callable[[str], None],
) -> NDArray[np.float32]:
    shape = (len(table.prompts), backend.dimension)
    key = prompt_digest("\0".join([backend.name, *table.prompts])).hex()
    known = None if file is None else _remembered(file, key)
    if known is not None and known.shape == shape:
        return known
    embeddings = np.zeros(shape, dtype=np.float32)
    # By length, so that little of a batch is padding.
    order = sorted(range(len(table.prompts)), key=lambda row: len(table.prompts[row]))
    for start in range(0, len(order), _PROMPTS_AT_ONCE):
        rows = order[start : start + _PROMPTS_AT_ONCE]
        embeddings[rows] = backend.embed([table.prompts[row] for row in rows])
        say(f"embedded {start + len(rows)} of {len(order)} prompts")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            np.savez(opened, embeddings=embeddings, key=np.array(key))
    return embeddings


def _remembered(file: Path, key: str) -> NDArray[np.float32] | None:
    try:
        with np.load(file, allow_pickle=False) as found:
            if str(found["key"]) != key:
                return None
            return np.asarray(found["embeddings"], dtype=np.float32)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None  # absent or damaged: embed anew
