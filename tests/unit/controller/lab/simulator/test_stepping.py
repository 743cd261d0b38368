"""Deciding step by step gives what the runner gives."""

import numpy as np
import pytest

from controller.lab.simulator.inputs import scenario_of, synthetic_inputs
from controller.lab.simulator.runner import simulate
from controller.lab.simulator.scenario_file import read_scenario
from controller.lab.simulator.stepping import SteppedCluster
from controller.lab.simulator.workload import poisson, workload_of
from controller.routing.policies import policy_named

CLUSTER = read_scenario("drlm")
SCENARIO = scenario_of(CLUSTER, synthetic_inputs(CLUSTER, 0, 40))


def test_steps_by_a_rule_end_like_a_run_of_the_policy_with_that_rule() -> None:
    rng = np.random.default_rng(0)
    workload = workload_of(poisson(60, 4.0, rng), SCENARIO.queries, rng)
    whole = simulate(SCENARIO, workload, policy_named("high-accuracy"), np.full(4, 0.25))
    stepped = SteppedCluster(SCENARIO)
    ended = []
    for moment, query, luck in zip(workload.arrivals, workload.query, workload.luck, strict=True):
        candidates, completed = stepped.arrive(int(query), float(moment))
        ended += completed
        stepped.assign(int(np.argmax(candidates.quality)), float(luck))
    _, completed = stepped.arrive(0, 1e6)
    for each in ended + completed:
        assert each.finished == pytest.approx(whole.finished[each.request])
        assert each.started == pytest.approx(whole.started[each.request])
    assert len(ended + completed) == 60


def test_candidates_tell_the_wait_of_their_node() -> None:
    stepped = SteppedCluster(SCENARIO)
    first, _ = stepped.arrive(3, 1.0)
    chosen = int(np.argmax(first.service_seconds))
    stepped.assign(chosen)
    second, _ = stepped.arrive(3, 2.0)
    mine = second.node_index == first.node_index[chosen]
    np.testing.assert_allclose(second.wait_seconds[mine], first.service_seconds[chosen] - 1.0)
    assert not second.wait_seconds[~mine].any()
    assert stepped.state().busy_slots.sum() == 1


def test_a_failed_node_is_not_feasible_until_it_joins() -> None:
    stepped = SteppedCluster(SCENARIO)
    candidates, _ = stepped.arrive(0, 1.0)
    node = int(candidates.node_index[0])
    number = stepped.assign(0)
    assert stepped.fail(node) == [number]
    candidates, _ = stepped.arrive(0, 2.0)
    assert not candidates.feasible[candidates.node_index == node].any()
    with pytest.raises(ValueError, match="is down"):
        stepped.assign(0)
    stepped.join(node)
    stepped.assign(0)
    assert stepped.state().is_up.all()


def test_steps_out_of_order_are_refused() -> None:
    stepped = SteppedCluster(SCENARIO)
    with pytest.raises(ValueError, match="call arrive first"):
        stepped.assign(0)
    with pytest.raises(ValueError, match="there is no query 40"):
        stepped.arrive(40, 0.0)
    stepped.arrive(0, 5.0)
    with pytest.raises(ValueError, match="call assign first"):
        stepped.arrive(0, 6.0)
    with pytest.raises(ValueError, match="no destination"):
        stepped.assign(-1)
    stepped.assign(0)
    with pytest.raises(ValueError, match="forward"):
        stepped.arrive(0, 4.0)
