"""How long answers get, as a distribution."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerLengthCurve:
    """The share of answers that are longer than so many tokens, if nothing cuts them off.

    Attributes:
        tokens: where each stretch of the curve begins, rising from 0; the last has no end.
        survival: the share in each stretch, falling from 1.
    """

    tokens: tuple[float, ...]
    survival: tuple[float, ...]

    @property
    def median_tokens(self) -> float:
        """Half of the answers are longer; infinite when more than half outlive the curve."""
        for tokens, share in zip(self.tokens, self.survival, strict=True):
            if share <= 0.5:
                return tokens
        return float("inf")
