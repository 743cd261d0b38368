import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.domain.cluster import NodeKind
from controller.profiler.network_profiler import (
    DEFAULT_BITS_PER_SECOND,
    DEFAULT_ROUND_TRIP_SECONDS,
    EMPTY_PROBE,
    FRESH_SECONDS,
    GREATEST_PROBE_BYTES,
    HALF_LIFE_SECONDS,
    LEAST_PROBE_BYTES,
    PathEstimate,
    ProbeSize,
)

INTERVAL = 60.0


def path(is_metered: bool = False) -> PathEstimate:
    return PathEstimate(NodeKind.EDGE, is_metered)


def measure(
    estimate: PathEstimate, up: float, down: float, round_trip: float = 0.02, now: float = 0.0
) -> float:
    """Probe a link of these bits a second until its size has settled; returns the time then."""
    for _ in range(40):
        now += INTERVAL
        estimate.probed(EMPTY_PROBE, round_trip, now)
        size = estimate.next_probe(True, INTERVAL, now)
        transfer = 8.0 * size.padding_bytes / up + 8.0 * size.echo_bytes / down
        estimate.probed(size, round_trip + transfer, now)
    return now


@pytest.mark.parametrize("kind", NodeKind)
def test_path_is_a_prior_until_measured(kind: NodeKind) -> None:
    found = PathEstimate(kind, False).path(0.0)
    assert found.round_trip_seconds == pytest.approx(DEFAULT_ROUND_TRIP_SECONDS[kind])
    assert (
        found.receive_bits_per_second == found.transmit_bits_per_second == DEFAULT_BITS_PER_SECOND
    )


@pytest.mark.parametrize(("up", "down"), [(1e6, 20e6), (100e6, 10e6), (3e5, 3e5), (900e6, 900e6)])
def test_goodput_is_found_both_ways_and_no_probe_lasts_long(up: float, down: float) -> None:
    estimate = path()
    now = measure(estimate, up, down)
    found = estimate.path(now)
    assert found.receive_bits_per_second == pytest.approx(up, rel=0.1)
    assert found.transmit_bits_per_second == pytest.approx(down, rel=0.1)
    for _ in range(2):
        now += INTERVAL
        size = estimate.next_probe(True, INTERVAL, now)
        assert not size.is_empty
        seconds = 8.0 * size.padding_bytes / up + 8.0 * size.echo_bytes / down
        assert seconds <= max(0.05, 8.0 * LEAST_PROBE_BYTES / min(up, down))


def test_link_that_slows_down_is_followed() -> None:
    estimate = path()
    now = measure(estimate, 100e6, 100e6)
    assert estimate.path(now).receive_bits_per_second == pytest.approx(100e6, rel=0.1)
    now = measure(estimate, 5e6, 5e6, now=now)
    assert estimate.path(now).receive_bits_per_second == pytest.approx(5e6, rel=0.2)


def test_nothing_is_sent_merely_to_measure_over_busy_or_metered_links() -> None:
    busy, metered = path(), path(is_metered=True)
    for estimate in (busy, metered):
        estimate.probed(EMPTY_PROBE, 0.02, 0.0)
    assert busy.next_probe(False, INTERVAL, 1.0).is_empty
    assert not busy.next_probe(True, INTERVAL, 1.0).is_empty
    assert metered.next_probe(True, INTERVAL, 1.0).is_empty


def test_sized_probes_follow_at_once_until_both_ways_are_known_and_then_rarely() -> None:
    estimate = path()
    estimate.probed(EMPTY_PROBE, 0.02, 0.0)
    for now in (1.0, 1.1):
        size = estimate.next_probe(True, INTERVAL, now)
        assert not size.is_empty
        estimate.probed(size, 0.05, now)
    assert estimate.next_probe(True, INTERVAL, INTERVAL).is_empty
    assert not estimate.next_probe(True, INTERVAL, 1.1 + INTERVAL).is_empty


def test_probe_too_small_for_a_fast_link_does_not_make_it_slow() -> None:
    """The rest of a few milliseconds is jitter; a greater probe will tell."""
    estimate = path()
    estimate.probed(EMPTY_PROBE, 0.02, 0.0)
    size = ProbeSize(padding_bytes=LEAST_PROBE_BYTES)
    estimate.probed(size, 0.0206, 1.0)
    fast = estimate.receive_bytes_per_second
    estimate.probed(size, 0.023, 2.0)
    assert estimate.receive_bytes_per_second == fast
    estimate.probed(size, 0.2, 3.0)
    assert estimate.receive_bytes_per_second < fast  # that was the link


def test_round_trip_comes_before_goodput() -> None:
    assert path().next_probe(True, INTERVAL, 0.0).is_empty


def test_measured_values_fall_back_to_the_prior_as_they_age() -> None:
    estimate = path()
    now = measure(estimate, 1e6, 1e6, round_trip=0.2)
    fresh = estimate.path(now)
    aged = estimate.path(now + FRESH_SECONDS + HALF_LIFE_SECONDS)
    ancient = estimate.path(now + 50 * HALF_LIFE_SECONDS)
    assert fresh.round_trip_seconds > aged.round_trip_seconds > ancient.round_trip_seconds
    assert (
        fresh.receive_bits_per_second
        < aged.receive_bits_per_second
        < ancient.receive_bits_per_second
    )
    assert ancient.receive_bits_per_second == pytest.approx(DEFAULT_BITS_PER_SECOND)
    assert estimate.round_trip_age_seconds(now + 5.0) == pytest.approx(5.0)


def test_ages_are_unknown_until_both_directions_were_measured() -> None:
    estimate = path()
    assert estimate.round_trip_age_seconds(1.0) is None
    estimate.probed(EMPTY_PROBE, 0.02, 1.0)
    estimate.probed(ProbeSize(padding_bytes=4096), 0.03, 1.0)
    assert estimate.goodput_age_seconds(2.0) is None
    estimate.probed(ProbeSize(echo_bytes=4096), 0.03, 1.5)
    assert estimate.goodput_age_seconds(2.0) == pytest.approx(1.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["empty", "to", "back"]),
            st.integers(1, GREATEST_PROBE_BYTES),
            st.floats(-1.0, 100.0),
        )
    )
)
def test_whatever_comes_back_sizes_and_rates_stay_possible(
    probes: list[tuple[str, int, float]],
) -> None:
    estimate, now = path(), 0.0
    for kind, size, seconds in probes:
        now += 1.0
        probe = {
            "empty": EMPTY_PROBE,
            "to": ProbeSize(padding_bytes=size),
            "back": ProbeSize(echo_bytes=size),
        }[kind]
        estimate.probed(probe, seconds, now)
        planned = estimate.next_probe(True, 0.0, now)
        assert 0 <= planned.padding_bytes + planned.echo_bytes <= GREATEST_PROBE_BYTES
        found = estimate.path(now)
        assert found.round_trip_seconds > 0.0
        assert found.receive_bits_per_second > 0.0
        assert found.transmit_bits_per_second > 0.0
