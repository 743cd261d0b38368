import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.link.backoff import Backoff


@given(st.integers(1, 10_000), st.integers(0, 2**32), st.floats(0.01, 5.0), st.floats(5.0, 60.0))
def test_delay_stays_within_its_bounds(
    failures: int, seed: int, first_seconds: float, cap_seconds: float
) -> None:
    """A node is back within the cap; and never at once."""
    backoff = Backoff(first_seconds, cap_seconds)
    bound = min(cap_seconds, first_seconds * 2.0 ** min(failures - 1, 16))
    delay = backoff.delay_seconds(failures, random.Random(seed))
    assert 0.1 * bound <= delay <= bound <= cap_seconds


def test_bound_doubles_with_each_failure_up_to_the_cap() -> None:
    class Latest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    delays = [Backoff(0.5, 15.0).delay_seconds(failures, Latest()) for failures in range(1, 9)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_fleet_that_lost_its_controller_at_one_moment_spreads() -> None:
    """No tenth of the interval gets more than a fraction of 500 nodes."""
    rng = random.Random(7)
    delays = [Backoff().delay_seconds(6, rng) for _ in range(500)]
    buckets = [0] * 10
    for delay in delays:
        buckets[min(int(delay / 1.5), 9)] += 1
    assert max(buckets) < 100


def test_same_generator_gives_the_same_delays() -> None:
    one, other = random.Random(3), random.Random(3)
    backoff = Backoff()
    assert [backoff.delay_seconds(n, one) for n in range(1, 9)] == pytest.approx(
        [backoff.delay_seconds(n, other) for n in range(1, 9)]
    )
