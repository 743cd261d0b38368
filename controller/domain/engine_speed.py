"""How fast a batching engine decodes, from its three measured rates.

One decoding step of c sequences takes t(c) = t(1) * ((1 - b) + b * c) seconds (ours). b = 0 is an
engine that decodes any number at the price of one, b = 1 one that gains nothing from batching.
F_1 = 1 / t(1) and F_B = s / t(s), with s the sequences that F_B was measured with.
"""

from dataclasses import replace
from typing import Final

from controller.domain.cluster import Calibration

CHUNK_SECONDS: Final = 0.15
"""While answers are written, an engine reads prompts in pieces of about this long between two
steps (the agent's scheduler; other engines are alike)."""


def batch_slope(calibration: Calibration, slots: int) -> float:
    """The formula's b, 0 to 1; `slots` stands in where the measurement does not say its own."""
    measured = calibration.measured_slots or max(slots, 1)
    if measured <= 1:
        return 1.0
    stretch = (
        measured
        * calibration.decode_tokens_per_second
        / calibration.saturated_decode_tokens_per_second
    )
    return min(max((stretch - 1.0) / (measured - 1), 0.0), 1.0)


def decode_step(calibration: Calibration, slots: int) -> tuple[float, float]:
    """Seconds of one decoding step as (fixed part, part of each sequence).

    Both are at least 0, and their sum is 1 / F_1.
    """
    alone = 1.0 / calibration.decode_tokens_per_second
    slope = batch_slope(calibration, slots)
    return (1.0 - slope) * alone, slope * alone


def for_slots(calibration: Calibration, slots: int) -> Calibration:
    """The same speeds with F_B of this many slots instead of those it was measured with."""
    if calibration.measured_slots in (0, slots):
        return calibration
    slope = batch_slope(calibration, slots)
    rate = calibration.decode_tokens_per_second * max(slots / ((1.0 - slope) + slope * slots), 1.0)
    return replace(calibration, saturated_decode_tokens_per_second=rate, measured_slots=slots)
