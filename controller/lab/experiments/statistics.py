"""Means, and differences of paired runs with their confidence intervals."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import stdtrit

from controller.routing.problem import FloatArray

CONFIDENCE: Final = 0.95

_RESAMPLES: Final = 4000


@dataclass(frozen=True, slots=True)
class Difference:
    """How a policy differs from another in one quantity, over runs with the same arrivals.

    Attributes:
        mean: of ours less theirs.
        low, high: of its 95 % confidence interval, by Student's t over the paired differences;
            NaN of a single run.
        change: mean of ours over mean of theirs, less 1; NaN where theirs is 0.
        change_low, change_high: 95 % interval of it, by resampling the pairs.
    """

    mean: float
    low: float
    high: float
    change: float
    change_low: float
    change_high: float


def student_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t.

    Raises:
        ValueError: there are no degrees of freedom.
    """
    if degrees < 1:
        raise ValueError("a confidence interval needs at least two runs")
    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))


def paired_difference(ours: FloatArray, theirs: FloatArray, seed: int = 0) -> Difference:
    """Compare two policies.

    Args:
        ours: float64[runs], of one quantity.
        theirs: float64[runs]; of the same seeds in the same order.
        seed: of the resampling.

    Raises:
        ValueError: there is no run, or not equally many.
    """
    if ours.shape != theirs.shape or ours.size == 0:
        raise ValueError(f"{ours.size} runs cannot be paired with {theirs.size}")
    each = ours - theirs
    mean = float(each.mean())
    low = high = float("nan")
    if each.size > 1:
        half = student_quantile(each.size - 1) * float(each.std(ddof=1)) / float(np.sqrt(each.size))
        low, high = mean - half, mean + half
    drawn = np.random.default_rng(seed).integers(0, ours.size, (_RESAMPLES, ours.size))
    change = _change(ours.mean(), theirs.mean())
    changes = _change(ours[drawn].mean(axis=1), theirs[drawn].mean(axis=1))
    edges = (
        np.nanquantile(changes, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
        if (np.isfinite(changes).any())
        else np.full(2, np.nan)
    )
    return Difference(mean, low, high, float(change), float(edges[0]), float(edges[1]))


def _change(ours: FloatArray, theirs: FloatArray) -> FloatArray:
    """Relative change, float64 of the shape of `theirs`; NaN where theirs is 0."""
    return np.asarray(
        np.divide(ours, theirs, out=np.full(np.shape(theirs), np.nan), where=np.abs(theirs) > 1e-12)
        - 1.0
    )
