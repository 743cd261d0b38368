"""Answer lengths from the profiled prompts nearest to a request (ours).

What is asked for is the length that a request's limit leaves, so every neighbour's answer is cut to
that limit first; a mean that is cut afterwards would be too long. A neighbour whose answer was cut
off itself says only that it would have been longer: it counts as long as it was, and beyond that as
answers of this destination go on (the imputation of Buckley and James, 1979, with an exponential
remainder). Neighbours that the destination never answered count by how long others found them.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.quality.neighbours import (
    Evidence,
    FloatArray,
    IntArray,
    Shrinkage,
    Source,
)

_MEDIAN_NEIGHBOURS: Final = 32
"""Of the nearest; they carry most of the weight, and the median's time grows with them."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthPrior:
    """How long answers are, similar prompts aside.

    Attributes:
        mean: float64[R, D]; within each request's limit.
        median: float64[R, D]; the same.
        typical: float64[D]; mean without any limit, above 0.
    """

    mean: FloatArray
    median: FloatArray
    typical: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class LengthEstimates:
    """Answer length of each request at each target, within the request's limit.

    Attributes:
        mean: float64[R, D], at least 1; what sums of work need.
        median: float64[R, D], at least 1; what a single answer is best foreseen by.
        count: int64[R, D]; neighbours behind the value, or answers behind the mean.
        source: int64[R, D]; a `Source`.
    """

    mean: FloatArray
    median: FloatArray
    count: IntArray
    source: IntArray


def answer_lengths(
    evidence: Evidence,
    limits: FloatArray,
    prior: LengthPrior,
    shrinkage: Shrinkage | None = None,
) -> LengthEstimates:
    """Weighted mean and median of the neighbours' lengths and the prior's.

    Args:
        evidence: what the store knows.
        limits: float64[R]; greatest answer length of each request.
        prior: weighs `length_weight`, the nearest neighbour weighs 1.
        shrinkage: how far neighbours are trusted.
    """
    settings = shrinkage or Shrinkage()
    lengths = _neighbour_lengths(evidence, limits, prior.typical, settings)
    weights = np.where(np.isnan(lengths), 0.0, _nearness(evidence, settings)[:, :, None])
    count = (weights > 0.0).sum(axis=1)
    values = np.concatenate([np.nan_to_num(lengths), prior.mean[:, None, :]], axis=1)
    shares = np.concatenate([weights, np.full_like(values[:, :1], settings.length_weight)], axis=1)
    mean = (shares * values).sum(axis=1) / shares.sum(axis=1)
    values[:, -1, :] = prior.median
    nearest = np.r_[: min(_MEDIAN_NEIGHBOURS, values.shape[1] - 1), values.shape[1] - 1]
    median = _weighted_median(values[:, nearest], shares[:, nearest])
    source = np.where(count > 0, Source.NEIGHBOURS, evidence.tokens_source)
    source = np.where(np.isnan(evidence.mean_tokens), Source.PRIOR, source)
    return LengthEstimates(
        np.maximum(mean, 1.0),
        np.clip(median, 1.0, np.maximum(limits, 1.0)[:, None]),  # 32 bits may round above it
        np.where(count > 0, count, evidence.tokens_count).astype(np.int64),
        source.astype(np.int64),
    )


def _nearness(evidence: Evidence, settings: Shrinkage) -> FloatArray:
    """float64[R, K]: what each neighbour weighs; 0 where there is none.

    Relative to the nearest, since kinds of prompts differ in how alike their prompts are: a riddle
    is near no other, and still is answered as other riddles are.
    """
    similarity = evidence.similarity[:, : settings.neighbours]
    is_identical = evidence.is_identical[:, : settings.neighbours]
    nearest = similarity.max(axis=1, initial=0.0, keepdims=True)
    weights = np.exp((similarity - nearest) / settings.length_bandwidth)
    weights = np.where(is_identical, settings.identical_weight, weights)
    return np.where(similarity > 0.0, weights, 0.0)


def _neighbour_lengths(
    evidence: Evidence, limits: FloatArray, typical: FloatArray, settings: Shrinkage
) -> FloatArray:
    """float64[R, K, D], within the limits; NaN where nobody's answer is known."""
    kept = slice(settings.neighbours)
    centre = np.where(np.isnan(evidence.mean_tokens), typical, evidence.mean_tokens)
    lengths = evidence.relative_length[:, kept, None] * centre
    own = evidence.tokens[:, kept]
    lengths = np.where(np.isnan(own), lengths, own)
    most = limits[:, None, None]
    cut = evidence.cut_tokens[:, kept]
    is_cut = ~np.isnan(cut)
    lengths = np.minimum(lengths, most)
    if is_cut.any():
        seen = np.where(is_cut, np.minimum(cut, most), 0.0)
        beyond = typical * -np.expm1((seen - most) / typical)
        lengths = np.where(is_cut, seen + beyond, lengths)
    return lengths


def _weighted_median(values: FloatArray, weights: FloatArray) -> FloatArray:
    """float64[R, D] over axis 1: the least value that half of the weight does not exceed."""
    # Sorting dominates: short rows of contiguous 32-bit numbers sort several times as fast.
    rows = np.ascontiguousarray(values.transpose(0, 2, 1), dtype=np.float32)
    shares = np.ascontiguousarray(weights.transpose(0, 2, 1), dtype=np.float32)
    order = np.argsort(rows, axis=2)
    running = np.cumsum(np.take_along_axis(shares, order, axis=2), axis=2)
    middle = (running >= 0.5 * running[:, :, -1:]).argmax(axis=2)
    place = np.take_along_axis(order, middle[:, :, None], axis=2)
    return np.take_along_axis(rows, place, axis=2)[:, :, 0].astype(np.float64)
