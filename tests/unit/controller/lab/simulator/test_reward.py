"""DRLM's reward, worked by hand and as the policies have it."""

import math

import numpy as np
import pytest

from controller.lab.simulator.reward import RewardWeights, step_rewards
from controller.routing.baselines.greedy_reward import rewards

QUALITY = np.array([0.2, 0.6, 1.0])
SECONDS = np.array([1.0, 3.0, 5.0])
NONE = np.zeros(3)
ALL = np.ones(3, dtype=np.bool_)


def test_the_reward_is_alpha_quality_less_beta_phi_of_latency() -> None:
    found = step_rewards(QUALITY, SECONDS, NONE, NONE, ALL)
    middle = 0.8 * 0.5 - 0.3 * math.expm1(1.5) / math.expm1(3.0)
    np.testing.assert_allclose(found, [0.0, middle, 0.5])


def test_it_is_what_greedy_reward_maximises() -> None:
    rng = np.random.default_rng(0)
    quality, seconds = rng.random(50), rng.exponential(9.0, 50)
    found = step_rewards(quality, seconds, np.zeros(50), np.zeros(50), np.ones(50, dtype=np.bool_))
    np.testing.assert_allclose(found, rewards(quality, seconds))


def test_infeasible_candidates_neither_count_nor_scale() -> None:
    feasible = np.array([True, True, False])
    found = step_rewards(QUALITY, SECONDS, NONE, NONE, feasible)
    assert math.isnan(found[2])
    np.testing.assert_allclose(found[:2], rewards(QUALITY[:2], SECONDS[:2]))


def test_energy_and_money_are_taken_off_by_their_share() -> None:
    weights = RewardWeights(energy=0.2, cost=0.1)
    plain = step_rewards(QUALITY, SECONDS, NONE, NONE, ALL)
    joules, usd = np.array([10.0, 0.0, 5.0]), np.array([0.0, 0.0, 7.0])
    found = step_rewards(QUALITY, SECONDS, joules, usd, ALL, weights)
    np.testing.assert_allclose(plain - found, [0.2, 0.0, 0.2])


def test_equal_candidates_are_worth_nothing_either_way() -> None:
    same = np.full(3, 0.5)
    np.testing.assert_array_equal(step_rewards(same, same, same, same, ALL), np.zeros(3))


def test_negative_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        RewardWeights(energy=-0.1)
