"""How long a destination's answers get, from its own completions.

Pure. Used where similar prompts say nothing. An answer that its limit cut off says only that it
would have been longer, so lengths are taken as exponential with mean A, for which the estimate from
censored lengths is simply all tokens over all answers that the model ended itself.
"""

from collections import deque
from typing import Final

TYPICAL_ANSWER_TOKENS: Final = 256.0
"""How long an answer gets when nothing but the model's own ending stops it (ours)."""

_PRIOR_ANSWERS: Final = 2.0
_WINDOW: Final = 64
_LONGEST_TOKENS: Final = 16384.0


class AnswerLengths:
    """The latest answers of one destination."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, bool]] = deque(maxlen=_WINDOW)

    def observe(self, tokens: int, was_cut: bool) -> None:
        """Take in one answer; `was_cut` when its limit ended it."""
        if tokens > 0:
            self._latest.append((tokens, was_cut))

    @property
    def typical_tokens(self) -> float:
        """A: the mean length of an answer that nothing cuts off."""
        tokens = _PRIOR_ANSWERS * TYPICAL_ANSWER_TOKENS + sum(n for n, _ in self._latest)
        ended = _PRIOR_ANSWERS + sum(not was_cut for _, was_cut in self._latest)
        return min(tokens / ended, _LONGEST_TOKENS)
