"""Nodes that come and go at random."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.lab.simulator.churn import Churn, random_outages


@given(st.integers(0, 10_000))
def test_outages_of_a_node_follow_each_other_and_those_away_at_first_are_known_to_be(
    seed: int,
) -> None:
    churn = Churn(100.0, 40.0, unnoticed_seconds=10.0)
    found = random_outages(5, churn, 800.0, np.random.default_rng(seed))
    for node in range(5):
        own = [outage for outage in found if outage.node == node]
        for earlier, later in itertools.pairwise(own):
            assert earlier.up_at < later.down_at
        for outage in own:
            assert outage.down_at < 800.0
            assert outage.down_at <= outage.up_at
            assert outage.unnoticed_seconds == (10.0 if outage.down_at > 0.0 else 0.0)


def test_nodes_are_away_as_often_as_said() -> None:
    churn = Churn(300.0, 100.0)
    found = random_outages(400, churn, 1000.0, np.random.default_rng(0))
    for moment in (0.0, 500.0, 999.0):
        away = sum(outage.down_at <= moment < outage.up_at for outage in found)
        assert away / 400 == pytest.approx(0.25, abs=0.07)  # three standard errors
    assert random_outages(3, Churn(1e9, 1e-3), 100.0, np.random.default_rng(0)) == []


@pytest.mark.parametrize("given", [(0.0, 1.0, 0.0), (1.0, float("inf"), 0.0), (1.0, 1.0, -1.0)])
def test_impossible_times_are_refused(given: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match=r"positive finite|lease"):
        Churn(*given)
