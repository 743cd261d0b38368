"""How long the answers of a fleet's destinations get within each request's limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.domain.answer_length import AnswerLengthCurve
from controller.domain.cluster import Destination
from controller.routing.problem import FloatArray, IntArray

TYPICAL_ANSWER_TOKENS: Final = 256.0
"""How long an answer gets when nothing but the model's own ending stops it (ours); a destination's
own completions replace it."""


def expected_answer_tokens(max_tokens: FloatArray) -> FloatArray:
    """Answer length when nothing but the limit is known: m * A / (m + A), A = 256 (ours).

    Close to the limit while the limit is what ends the answer, and saturating at a typical
    answer when it is far away: 28 tokens at 32, 128 at 256, 241 at 4096.
    """
    expected: FloatArray = max_tokens * TYPICAL_ANSWER_TOKENS / (max_tokens + TYPICAL_ANSWER_TOKENS)
    return expected


@dataclass(frozen=True, slots=True, eq=False)
class FleetAnswerLengths:
    """How long the answers of D destinations get; of K of them there is a curve.

    A curve has at most S stretches.

    Attributes:
        curves: D; None where the destination has not told any.
        known: int64[K]; the destinations with a curve.
        starts: float64[K, S]; where each stretch begins; infinite behind the last.
        survival: float64[K, S]; share of the answers in each.
        before: float64[K, S]; mean tokens of an answer up to its start.
        median_tokens: float64[K].
    """

    curves: tuple[AnswerLengthCurve | None, ...]
    known: IntArray
    starts: FloatArray
    survival: FloatArray
    before: FloatArray
    median_tokens: FloatArray

    def within(self, max_tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
        """float64[R, D] twice: mean and median length of answers with these limits, float64[R].

        By each destination's own answers; `expected_answer_tokens` where it has not told any.
        """
        expected = expected_answer_tokens(max_tokens)[:, None]
        mean = np.repeat(expected, len(self.curves), axis=1)
        median = mean.copy()
        if self.known.size:
            mean[:, self.known] = self._means(max_tokens)
            median[:, self.known] = np.minimum(max_tokens[:, None], self.median_tokens)
        return mean, median

    def _means(self, max_tokens: FloatArray) -> FloatArray:
        """float64[R, K]: mean length within each limit, float64[R]."""
        limits, row_of = np.unique(max_tokens, return_inverse=True)  # most requests share theirs
        found = np.empty((limits.size, self.known.size))
        for row, limit in enumerate(limits):
            stretch = (self.starts <= limit).sum(axis=1) - 1
            at = (np.arange(stretch.size), stretch)
            found[row] = self.before[at] + self.survival[at] * (limit - self.starts[at])
        return np.asarray(found[row_of])


def lengths_of(
    destinations: Sequence[Destination], last: FleetAnswerLengths | None = None
) -> FleetAnswerLengths:
    """The destinations' curves as arrays.

    Args:
        destinations: D.
        last: of earlier destinations; rows of curves that are the same objects are copied from
            there, for completions move one now and then, and the others stay.
    """
    every = tuple([destination.answer_lengths for destination in destinations])
    known = np.array([at for at, curve in enumerate(every) if curve is not None], dtype=np.int64)
    curves = [curve for curve in every if curve is not None]
    size = max((len(curve.tokens) for curve in curves), default=0)
    if last is not None:
        size = max(size, last.starts.shape[1])
    starts = np.full((len(curves), size), np.inf)
    survival, before = np.zeros(starts.shape), np.zeros(starts.shape)
    median = np.zeros(len(curves))
    rows = np.full(len(curves), -1, dtype=np.int64)  # of each curve in the last ones
    if last is not None:
        of_last = {id(last.curves[d]): row for row, d in enumerate(last.known)}
        rows[:] = [of_last.get(id(curve), -1) for curve in curves]
        kept, width = rows >= 0, last.starts.shape[1]
        starts[kept, :width] = last.starts[rows[kept]]
        survival[kept, :width] = last.survival[rows[kept]]
        before[kept, :width] = last.before[rows[kept]]
        median[kept] = last.median_tokens[rows[kept]]
    for row in np.flatnonzero(rows < 0):
        curve = curves[row]
        end = len(curve.tokens)
        starts[row, :end], survival[row, :end] = curve.tokens, curve.survival
        stretches = survival[row, : end - 1] * np.diff(starts[row, :end])
        np.cumsum(stretches, out=before[row, 1:end])
        median[row] = curve.median_tokens
    return FleetAnswerLengths(every, known, starts, survival, before, median)
