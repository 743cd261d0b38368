"""Speeds of one model on one node, kept true by every completion.

Pure. A node measures its models once, undisturbed; what it reports is the prior here. Real load,
another governor, a hot summer or a neighbour on the same machine make it wrong, so each completion
moves the estimate, robustly: what counts is the median of the latest ratios between measured and
expected seconds, which follows a drift within half a window and ignores single outliers.

The curve over the number of sequences is that of `controller.domain.engine_speed`. Its level t(1)
and its slope b cannot be told apart while the number stays the same, so b is fitted only from
neighbouring completions of different company: a drift moves both of a pair alike and leaves their
difference alone.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from controller.domain.cluster import Calibration
from controller.domain.engine_speed import batch_slope

LEVEL_WINDOW: Final = 11
"""Latest ratios whose median is the level: a step has passed half of them after 6 completions."""

_PRIOR_RATIOS: Final = 3
"""How many ratios of 1 a measured calibration counts for at the start."""

_SHAPE_WINDOW: Final = 64
_SHAPE_CANDIDATES: Final = np.linspace(0.0, 1.0, 41)
_SHAPE_PRIOR_WEIGHT: Final = 0.5
_LEAST_SHAPE_PAIRS: Final = 6
_LEAST_SPREAD: Final = 0.4
"""Two completions differ in their number of sequences when it differs by this much of the lesser,
as a fraction; less is noise."""

_SHAPE_EVERY: Final = 4
"""Completions between two fits of the slope."""

DEFAULT_THROTTLED_RATIO: Final = 1.5
"""Steps take so much longer on a node that says it throttles, until its own completions say by how
much: field reports range from 1.2 to 2."""

_GREATEST_LOG_RATIO: Final = math.log(50.0)
"""Beyond this a measurement is a fault, not a speed."""

_LEAST_TOKENS: Final = 4
"""Fewer tokens than this tell the overhead, not the speed."""


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """Prompt tokens that were read, and the engine seconds it took."""

    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One answer's decoding.

    Attributes:
        steps: tokens after the first, which the prefill gave.
        seconds: of the engine, for these steps; prompts of others read meanwhile taken off.
        mean_sequences: that decoded at once meanwhile, this one included; at least 1.
    """

    steps: float
    seconds: float
    mean_sequences: float


@dataclass(frozen=True, slots=True)
class EnergySample:
    """Joules above idle, by the node's own counters; None where they are not told apart."""

    prompt_tokens: float
    prefill_joules: float | None
    completion_tokens: float
    decode_joules: float | None


class MedianLevel:
    """A level in log space: the median of the latest values, the prior's zeros among them.

    Args:
        prior: the level before anything was measured.
        prior_count: how many values the prior counts for; they leave the window first.
        greatest: values beyond this, either way, are faults.
    """

    def __init__(
        self,
        prior: float = 0.0,
        prior_count: int = _PRIOR_RATIOS,
        greatest: float = _GREATEST_LOG_RATIO,
    ) -> None:
        self._values: deque[float] = deque([prior] * prior_count, maxlen=LEVEL_WINDOW)
        self._greatest = greatest
        self.count = 0

    def observe(self, value: float) -> None:
        """Take in one value; values that cannot be are dropped."""
        if math.isfinite(value) and abs(value) <= self._greatest:
            self._values.append(value)
            self.count += 1

    @property
    def value(self) -> float:
        """The median."""
        ordered = sorted(self._values)
        middle = len(ordered) // 2
        if len(ordered) % 2:
            return ordered[middle]
        return 0.5 * (ordered[middle - 1] + ordered[middle])


class SpeedEstimate:
    """The current belief about one model on one node.

    Args:
        base: what the node measured, or what was remembered of its like.
        slots: sequences that the engine decodes at once.
    """

    def __init__(self, base: Calibration, slots: int) -> None:
        self.base = base
        self._slots = max(slots, 1)
        self._slope = batch_slope(base, self._slots)
        self._base_slope = self._slope
        self._prefill = {False: MedianLevel()}
        self._decode = {False: MedianLevel()}
        self._joules = (MedianLevel(0.0, 0, 20.0), MedianLevel(0.0, 0, 20.0))
        self._recent: deque[tuple[float, float]] = deque(maxlen=_SHAPE_WINDOW)
        self._until_fit = _SHAPE_EVERY
        self.is_throttled = False
        self._current: Calibration | None = None

    @property
    def completions(self) -> int:
        """Decodings that have been taken in, throttled ones included."""
        return sum(level.count for level in self._decode.values())

    def set_throttled(self, is_throttled: bool) -> None:
        """The node says that it throttles, or that it does so no longer.

        Each state has a level of its own: the throttled one begins at the other times
        `DEFAULT_THROTTLED_RATIO` and is kept for the next time, and when throttling ends the speed
        from before holds again at once.
        """
        if is_throttled == self.is_throttled:
            return
        self.is_throttled, self._current = is_throttled, None
        for levels in (self._prefill, self._decode):
            if is_throttled not in levels:
                levels[is_throttled] = MedianLevel(
                    levels[not is_throttled].value + math.log(DEFAULT_THROTTLED_RATIO)
                )

    def observe_prefill(self, sample: PrefillSample) -> None:
        """Learn from a prompt that was read."""
        if sample.tokens < _LEAST_TOKENS or sample.seconds <= 0.0:
            return
        expected = sample.tokens / self.base.prefill_tokens_per_second
        self._prefill[self.is_throttled].observe(math.log(sample.seconds / expected))
        self._current = None

    def observe_decode(self, sample: DecodeSample) -> None:
        """Learn from an answer that was written."""
        if sample.steps < _LEAST_TOKENS or sample.seconds <= 0.0:
            return
        sequences = max(sample.mean_sequences, 1.0)
        measured = math.log(sample.seconds / sample.steps * self.base.decode_tokens_per_second)
        if abs(measured) > _GREATEST_LOG_RATIO + math.log(sequences):
            return
        self._recent.append((sequences, measured))
        self._until_fit -= 1
        if self._until_fit <= 0:
            self._until_fit = _SHAPE_EVERY
            self._fit_slope()
        stretch = math.log((1.0 - self._slope) + self._slope * sequences)
        self._decode[self.is_throttled].observe(measured - stretch)
        self._current = None

    def observe_energy(self, sample: EnergySample) -> None:
        """Learn what a token costs."""
        pairs = (
            (sample.prompt_tokens, sample.prefill_joules),
            (sample.completion_tokens, sample.decode_joules),
        )
        for level, (tokens, joules) in zip(self._joules, pairs, strict=True):
            if joules is not None and joules > 0.0 and tokens >= _LEAST_TOKENS:
                level.observe(math.log(joules / tokens))
        self._current = None

    @property
    def slope(self) -> float:
        """The formula's b, 0 to 1."""
        return self._slope

    def calibration(self) -> Calibration:
        """The speeds to predict with; `saturated_decode_tokens_per_second` is that of all slots."""
        if self._current is None:
            self._current = self._calibration()
        return self._current

    def _calibration(self) -> Calibration:
        base, state = self.base, self.is_throttled
        decode = base.decode_tokens_per_second * math.exp(-self._decode[state].value)
        stretch = (1.0 - self._slope) + self._slope * self._slots
        prefill_joules, decode_joules = (
            math.exp(level.value) if level.count else known
            for level, known in zip(
                self._joules,
                (base.prefill_joules_per_token, base.decode_joules_per_token),
                strict=True,
            )
        )
        return replace(
            base,
            prefill_tokens_per_second=base.prefill_tokens_per_second
            * math.exp(-self._prefill[state].value),
            decode_tokens_per_second=decode,
            saturated_decode_tokens_per_second=decode * max(self._slots / stretch, 1.0),
            measured_slots=self._slots,
            prefill_joules_per_token=prefill_joules,
            decode_joules_per_token=decode_joules,
        )

    def _fit_slope(self) -> None:
        """The slope under which neighbouring completions of different company agree best."""
        sequences = np.array([item[0] for item in self._recent])
        measured = np.array([item[1] for item in self._recent])
        lesser = np.minimum(sequences[1:], sequences[:-1])
        differs = np.abs(np.diff(sequences)) >= _LEAST_SPREAD * lesser
        if differs.sum() < _LEAST_SHAPE_PAIRS:
            return
        slopes = _SHAPE_CANDIDATES[:, None]
        expected = np.log((1.0 - slopes) + slopes * sequences)  # [candidates, completions]
        gaps = np.abs(np.diff(measured - expected, axis=1))[:, differs].sum(axis=1)
        gaps += _SHAPE_PRIOR_WEIGHT * np.abs(_SHAPE_CANDIDATES - self._base_slope)
        best = float(_SHAPE_CANDIDATES[int(gaps.argmin())])
        # The levels hold what was left over under the old slope; moving a little each time keeps
        # both in step without looking back.
        self._slope += 0.5 * (best - self._slope)
