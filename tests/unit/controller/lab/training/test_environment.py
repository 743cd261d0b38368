"""The Gymnasium environment, by Gymnasium's own checker and by hand."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from controller.lab.simulator.inputs import scenario_of, synthetic_inputs
from controller.lab.simulator.reward import RewardWeights, step_rewards
from controller.lab.simulator.scenario_file import read_scenario
from controller.lab.training.environment import RoutingEnvironment

CLUSTER = read_scenario("drlm")
SCENARIO = scenario_of(CLUSTER, synthetic_inputs(CLUSTER, 0, 60))


@pytest.mark.parametrize("down_ratio", [0.0, 0.6])
def test_it_keeps_gymnasiums_contract(down_ratio: float) -> None:
    check_env(RoutingEnvironment(SCENARIO, 12, down_ratio=down_ratio), skip_render_check=True)


def test_an_episode_ends_by_truncation_after_its_queries() -> None:
    environment = RoutingEnvironment(SCENARIO, 5)
    environment.reset(seed=0)
    ends = [environment.step(np.int64(0))[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]


def test_the_reward_is_drlms_of_what_was_seen() -> None:
    weights = RewardWeights(energy=0.3)
    environment = RoutingEnvironment(SCENARIO, 5, weights=weights)
    seen, info = environment.reset(seed=1)
    _, reward, _, _, after = environment.step(np.int64(17))
    expected = step_rewards(
        seen["quality"],
        seen["service_seconds"] + seen["wait_seconds"],
        seen["energy_joules"],
        seen["cost_usd"],
        info["action_mask"],
        weights,
    )
    assert reward == pytest.approx(expected[17], abs=1e-5)
    assert after["is_feasible"]
    assert after["wait_seconds"] == seen["wait_seconds"][17]


def test_what_was_sent_is_waited_for() -> None:
    environment = RoutingEnvironment(SCENARIO, 5, rate=1000.0)
    environment.reset(seed=2)
    seen, *_ = environment.step(np.int64(0))
    assert seen["busy_slots"][0] == 1.0
    assert seen["wait_seconds"][0] > 0.0
    assert seen["remaining_seconds"][0] == pytest.approx(seen["wait_seconds"][0])
    seen, *_ = environment.step(np.int64(0))
    assert seen["queue_length"][0] == 1.0


def test_an_infeasible_action_costs_most_and_the_query_goes_on() -> None:
    environment = RoutingEnvironment(SCENARIO, 50, rate=1000.0, down_ratio=0.9)
    _, info = environment.reset(seed=3)
    away = int(np.flatnonzero(~info["action_mask"])[0])
    seen, reward, _, _, after = environment.step(np.int64(away))
    assert reward == pytest.approx(-0.3)
    assert not after["is_feasible"]
    assert seen["busy_slots"].sum() == 1.0
    np.testing.assert_array_equal(environment.action_masks(), after["action_mask"])


def test_the_same_seed_gives_the_same_episode() -> None:
    def rewards(seed: int) -> list[float]:
        environment = RoutingEnvironment(SCENARIO, 6, down_ratio=0.3)
        _, info = environment.reset(seed=seed)
        found = []
        for _ in range(6):
            action = np.flatnonzero(info["action_mask"])[-1]
            _, reward, _, _, info = environment.step(action)
            found.append(reward)
        return found

    assert rewards(4) == rewards(4)
    assert rewards(4) != rewards(5)


def test_a_step_needs_a_reset_and_an_episode_a_rate() -> None:
    with pytest.raises(RuntimeError, match="call reset"):
        RoutingEnvironment(SCENARIO).step(np.int64(0))
    with pytest.raises(ValueError, match="rate above 0"):
        RoutingEnvironment(SCENARIO, rate=0.0)
