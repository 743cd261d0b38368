"""What learners train on is what the simulator judges on, but for the queries."""

from dataclasses import replace

import numpy as np
import pytest

from controller.lab.simulator.inputs import InputsError, scenario_of, synthetic_inputs
from controller.lab.simulator.scenario_file import read_scenario
from controller.lab.training.scenario_world import world_of
from controller.lab.training.vector_environment import VectorEnvironment

CLUSTER = read_scenario("drlm")
INPUTS = synthetic_inputs(CLUSTER, 0, 60)


def test_the_fleet_is_the_simulators_and_held_out_queries_are_left_out() -> None:
    world, scenario = world_of(CLUSTER, INPUTS), scenario_of(CLUSTER, INPUTS)
    assert world.quality.shape[0] == 48
    np.testing.assert_array_equal(world.layout.node_keys, scenario.node_keys)
    np.testing.assert_array_equal(world.layout.model_keys, scenario.model_keys)
    node_of, model_of = np.nonzero(world.layout.deployed.T)
    np.testing.assert_array_equal(node_of, scenario.node_of)
    np.testing.assert_array_equal(model_of, scenario.model_of)
    known = ~INPUTS.is_held_out
    np.testing.assert_array_equal(world.seconds, scenario.seconds[known])
    kind = world.layout.kind_of_node
    np.testing.assert_allclose(world.watts[kind], scenario.watts)
    np.testing.assert_allclose(world.usd_per_second[kind], scenario.usd_per_second)
    assert world.layout.choices == 12
    assert world.layout.levels == 5
    VectorEnvironment(world, 2, np.random.default_rng(0)).reset()


def test_real_times_are_as_noisy_as_in_the_inputs() -> None:
    assert world_of(CLUSTER, INPUTS).noise == INPUTS.noise
    rng = np.random.default_rng(0)
    true = INPUTS.seconds * np.exp(rng.normal(0.0, 0.4, INPUTS.seconds.shape))
    measured = replace(INPUTS, true_seconds=true, noise=0.3)
    assert world_of(CLUSTER, measured).noise == pytest.approx(0.5, abs=0.03)


def test_inputs_of_another_cluster_are_refused() -> None:
    smaller = replace(CLUSTER, models=CLUSTER.models[:4])
    with pytest.raises(InputsError, match="not of scenario"):
        world_of(smaller, INPUTS)
