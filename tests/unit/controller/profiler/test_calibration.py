import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.domain.cluster import Calibration
from controller.domain.engine_speed import decode_step, for_slots
from controller.profiler.calibration import (
    DEFAULT_THROTTLED_RATIO,
    DecodeSample,
    EnergySample,
    PrefillSample,
    SpeedEstimate,
)

BASE = Calibration(200.0, 20.0, 60.0)
SLOTS = 8


def step_seconds(calibration: Calibration, sequences: float) -> float:
    fixed, each = decode_step(calibration, SLOTS)
    return fixed + each * sequences


def complete(
    estimate: SpeedEstimate,
    truth: Calibration,
    count: int,
    rng: np.random.Generator,
    noise: float = 0.05,
    sequences: tuple[float, ...] = (1.0, 2.0, 4.0, 6.0, 8.0),
    outlier_ratio: float = 0.0,
) -> None:
    """Completions of an engine whose real speeds are `truth`."""
    for _ in range(count):
        together = float(rng.choice(sequences))
        tokens = int(rng.integers(20, 100))
        factor = math.exp(rng.normal(0.0, noise))
        if rng.random() < outlier_ratio:
            factor *= float(rng.choice([0.1, 8.0]))
        estimate.observe_decode(
            DecodeSample(tokens, tokens * step_seconds(truth, together) * factor, together)
        )
        estimate.observe_prefill(
            PrefillSample(tokens, tokens / truth.prefill_tokens_per_second * factor)
        )


def slower(calibration: Calibration, ratio: float) -> Calibration:
    return Calibration(
        calibration.prefill_tokens_per_second / ratio,
        calibration.decode_tokens_per_second / ratio,
        calibration.saturated_decode_tokens_per_second / ratio,
    )


def assert_close(found: Calibration, truth: Calibration, within: float) -> None:
    assert found.prefill_tokens_per_second == pytest.approx(
        truth.prefill_tokens_per_second, rel=within
    )
    assert found.decode_tokens_per_second == pytest.approx(
        truth.decode_tokens_per_second, rel=within
    )
    assert found.saturated_decode_tokens_per_second == pytest.approx(
        truth.saturated_decode_tokens_per_second, rel=within
    )


def test_estimate_begins_with_what_was_measured() -> None:
    assert_close(SpeedEstimate(BASE, SLOTS).calibration(), BASE, 1e-9)


@pytest.mark.parametrize("ratio", [2.0, 0.5, 1.3])
@pytest.mark.parametrize("seed", range(5))
def test_change_of_speed_is_followed_within_twenty_completions(ratio: float, seed: int) -> None:
    """Within 10 % after 20 completions."""
    rng = np.random.default_rng(seed)
    estimate = SpeedEstimate(BASE, SLOTS)
    complete(estimate, BASE, 60, rng)
    complete(estimate, slower(BASE, ratio), 20, rng)
    assert_close(estimate.calibration(), slower(BASE, ratio), 0.1)


@pytest.mark.parametrize("seed", range(5))
def test_outliers_do_not_throw_the_estimate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    estimate = SpeedEstimate(BASE, SLOTS)
    complete(estimate, BASE, 200, rng, outlier_ratio=0.15)
    assert_close(estimate.calibration(), BASE, 0.12)


def test_one_absurd_completion_changes_nothing() -> None:
    estimate = SpeedEstimate(BASE, SLOTS)
    before = estimate.calibration()
    for seconds in (1e9, 1e-9, 0.0, -5.0):
        estimate.observe_decode(DecodeSample(50, seconds, 1.0))
        estimate.observe_prefill(PrefillSample(50, seconds))
    assert estimate.calibration() == before


def test_gain_of_batching_is_found_where_the_company_varies() -> None:
    """A level and a slope, told apart: the engine batches far better than was measured."""
    rng = np.random.default_rng(0)
    truth = Calibration(200.0, 20.0, 120.0)
    estimate = SpeedEstimate(BASE, SLOTS)
    complete(estimate, truth, 80, rng)
    assert_close(estimate.calibration(), truth, 0.12)


def test_slope_stays_where_the_company_never_varies() -> None:
    """All completions in the same company cannot tell a slow engine from a poor batcher."""
    estimate = SpeedEstimate(BASE, SLOTS)
    before = estimate.slope
    complete(estimate, slower(BASE, 2.0), 60, np.random.default_rng(0), sequences=(4.0,))
    assert estimate.slope == before
    fixed, each = decode_step(estimate.calibration(), SLOTS)
    assert fixed + 4 * each == pytest.approx(2 * step_seconds(BASE, 4.0), rel=0.1)


def test_drift_is_not_taken_for_a_slope() -> None:
    rng = np.random.default_rng(0)
    estimate = SpeedEstimate(BASE, SLOTS)
    complete(estimate, BASE, 30, rng, sequences=(1.0,))
    complete(estimate, slower(BASE, 2.0), 30, rng, sequences=(8.0,))
    assert estimate.slope == pytest.approx(SpeedEstimate(BASE, SLOTS).slope)


def test_throttled_node_is_slower_at_once_and_as_fast_again_at_once() -> None:
    rng = np.random.default_rng(0)
    estimate = SpeedEstimate(BASE, SLOTS)
    complete(estimate, BASE, 20, rng)
    cool = estimate.calibration()
    estimate.set_throttled(True)
    assert estimate.calibration().decode_tokens_per_second == pytest.approx(
        cool.decode_tokens_per_second / DEFAULT_THROTTLED_RATIO
    )
    complete(estimate, slower(BASE, 2.5), 20, rng)
    assert_close(estimate.calibration(), slower(BASE, 2.5), 0.1)
    estimate.set_throttled(False)
    assert_close(estimate.calibration(), cool, 0.1)
    estimate.set_throttled(True)  # the second time it is known by how much
    assert_close(estimate.calibration(), slower(BASE, 2.5), 0.1)


def test_joules_a_token_come_from_the_counters() -> None:
    estimate = SpeedEstimate(BASE, SLOTS)
    assert estimate.calibration().decode_joules_per_token is None
    for _ in range(5):
        estimate.observe_energy(EnergySample(100, 2.0, 50, 25.0))
    found = estimate.calibration()
    assert found.prefill_joules_per_token == pytest.approx(0.02)
    assert found.decode_joules_per_token == pytest.approx(0.5)
    estimate.observe_energy(EnergySample(100, None, 50, None))
    assert estimate.calibration() == found


@given(
    st.floats(1.0, 1e4),
    st.floats(1.0, 64.0),
    st.integers(1, 64),
    st.integers(0, 64),
)
def test_step_gives_back_the_rates_that_it_was_made_of(
    decode: float, gain: float, slots: int, measured: int
) -> None:
    together = measured or slots
    saturated = decode * min(gain, together)
    calibration = Calibration(100.0, decode, saturated, measured_slots=measured)
    fixed, each = decode_step(calibration, slots)
    assert fixed >= 0.0
    assert each >= 0.0
    assert 1.0 / (fixed + each) == pytest.approx(decode)
    assert together / (fixed + each * together) == pytest.approx(saturated)
    again = for_slots(calibration, slots)
    assert slots / (fixed + each * slots) == pytest.approx(again.saturated_decode_tokens_per_second)
