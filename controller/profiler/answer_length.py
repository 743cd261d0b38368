"""How long a destination's answers get, from its own completions.

Pure. Used where similar prompts say nothing. An answer that its limit cut off says only that it
would have been longer, so the distribution is the product-limit estimate for censored lengths
(Kaplan and Meier, 1958), together with a few answers of a prior.
"""

import math
from bisect import bisect_left
from collections import Counter, deque
from typing import Final

from controller.domain.answer_length import AnswerLengthCurve

TYPICAL_ANSWER_TOKENS: Final = 256.0
"""Mean of the prior: how long an answer gets when nothing is known of the model (ours)."""

_PRIOR_ANSWERS: Final = 2.0
_WINDOW: Final = 64
_LEFT_OUT: Final = 16
_GRID: Final = tuple(float(2**exponent) for exponent in range(2, 15))
"""Where the prior falls, beside the lengths that were seen."""


class AnswerLengths:
    """The latest answers of one destination."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, bool]] = deque(maxlen=_WINDOW)
        self._curve: AnswerLengthCurve | None = None
        self._unseen = 0  # answers that came after the curve

    def observe(self, tokens: int, was_cut: bool) -> None:
        """Take in one answer; `was_cut` when its limit ended it."""
        if tokens > 0:
            self._latest.append((tokens, was_cut))
            self._unseen += 1

    @property
    def curve(self) -> AnswerLengthCurve:
        """The distribution of lengths; at most a sixteenth of the answers are missing in it.

        So few move it little, and a decision on a busy fleet would have every destination's made
        anew.
        """
        if self._curve is None or self._unseen > len(self._latest) // _LEFT_OUT:
            self._curve, self._unseen = self._estimate(), 0
        return self._curve

    def _estimate(self) -> AnswerLengthCurve:
        # Sorted and counted once, which matters to the first decision after many completions.
        lengths = sorted(tokens for tokens, _ in self._latest)
        ended = Counter(float(tokens) for tokens, was_cut in self._latest if not was_cut)
        points = [0.0, *sorted({*ended, *_GRID})]
        survival, last = [1.0], 0.0
        for point in points[1:]:
            # Of those that got this far, how many go on: seen ones, and the prior's share.
            reached = len(lengths) - bisect_left(lengths, point)
            ends = ended[point]
            prior = _PRIOR_ANSWERS * math.exp(-last / TYPICAL_ANSWER_TOKENS)
            prior_ends = prior * -math.expm1(-(point - last) / TYPICAL_ANSWER_TOKENS)
            survival.append(survival[-1] * (1.0 - (ends + prior_ends) / (reached + prior)))
            last = point
        return AnswerLengthCurve(tuple(points), tuple(survival))
