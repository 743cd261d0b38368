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


def answer_tokens(
    destinations: Sequence[Destination], max_tokens: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """float64[R, D] twice: mean and median length of the destinations' answers with these limits.

    By each destination's own answers; `expected_answer_tokens` where it has not told any.

    Args:
        destinations: D.
        max_tokens: float64[R].
    """
    mean = np.repeat(expected_answer_tokens(max_tokens)[:, None], len(destinations), axis=1)
    median = mean.copy()
    of_all = [destination.answer_lengths for destination in destinations]
    curves = tuple([curve for curve in of_all if curve is not None])
    if not curves:
        return mean, median
    told = _Latest.told  # one look, for another thread may ask as well
    if told is None or told.curves != curves:
        told = _Latest.told = _told(curves, told)
    columns = [at for at, curve in enumerate(of_all) if curve is not None]
    mean[:, columns] = told.means(max_tokens)
    median[:, columns] = np.minimum(max_tokens[:, None], told.median_tokens)
    return mean, median


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """K curves of at most S stretches.

    Attributes:
        curves: K; what the rows were made from.
        starts: float64[K, S]; where each stretch begins; infinite behind the last.
        survival: float64[K, S]; share of the answers in each.
        before: float64[K, S]; mean tokens of an answer up to its start.
        median_tokens: float64[K].
    """

    curves: tuple[AnswerLengthCurve, ...]
    starts: FloatArray
    survival: FloatArray
    before: FloatArray
    median_tokens: FloatArray

    def means(self, max_tokens: FloatArray) -> FloatArray:
        """float64[R, K]: mean length within each limit, float64[R]."""
        limits, row_of = np.unique(max_tokens, return_inverse=True)  # most requests share theirs
        found = np.empty((limits.size, len(self.curves)))
        for row, limit in enumerate(limits):
            stretch = (self.starts <= limit).sum(axis=1) - 1
            at = (np.arange(stretch.size), stretch)
            found[row] = self.before[at] + self.survival[at] * (limit - self.starts[at])
        return np.asarray(found[row_of])


class _Latest:
    """The curves asked about last: completions move one now and then, and the others stay."""

    told: _Told | None = None


def _told(curves: tuple[AnswerLengthCurve, ...], last: _Told | None) -> _Told:
    """The curves as arrays; those that `last` has already are copied from there."""
    size = max(len(curve.tokens) for curve in curves)
    if last is not None:
        size = max(size, last.starts.shape[1])
    starts = np.full((len(curves), size), np.inf)
    survival, before = np.zeros(starts.shape), np.zeros(starts.shape)
    median = np.zeros(len(curves))
    row_of = {} if last is None else {id(curve): row for row, curve in enumerate(last.curves)}
    earlier: IntArray = np.array([row_of.get(id(curve), -1) for curve in curves], dtype=np.int64)
    if last is not None:
        kept, width = earlier >= 0, last.starts.shape[1]
        starts[kept, :width] = last.starts[earlier[kept]]
        survival[kept, :width] = last.survival[earlier[kept]]
        before[kept, :width] = last.before[earlier[kept]]
        median[kept] = last.median_tokens[earlier[kept]]
    for row in np.flatnonzero(earlier < 0):
        curve = curves[row]
        end = len(curve.tokens)
        starts[row, :end], survival[row, :end] = curve.tokens, curve.survival
        stretches = survival[row, : end - 1] * np.diff(starts[row, :end])
        np.cumsum(stretches, out=before[row, 1:end])
        median[row] = curve.median_tokens
    return _Told(curves, starts, survival, before, median)
