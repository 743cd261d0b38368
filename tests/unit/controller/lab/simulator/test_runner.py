"""Policies in the simulated cluster, on a fleet small enough to follow by hand."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest

from controller.lab.simulator.cluster import NodeEvent
from controller.lab.simulator.problems import ProblemSource
from controller.lab.simulator.runner import (
    Outage,
    QueryOutcome,
    SimulatedWindow,
    outages_of,
    simulate,
)
from controller.lab.simulator.scenario import Scenario
from controller.lab.simulator.workload import Workload, poisson, workload_of
from controller.routing.baselines.greedy_reward import rewards
from controller.routing.policies import policy_named
from controller.routing.policy import UNASSIGNED, Budget, Decision
from controller.routing.problem import RoutingProblem, name_key

WEIGHTS = np.array([0.7, 0.0, 0.0, 0.3])


def scenario(noise: float = 0.0) -> Scenario:
    """A small and a large model on a slow node, the large one also on a fast node."""
    return Scenario(
        node_of=np.array([0, 0, 1]),
        model_of=np.array([0, 1, 1]),
        kind_of_node=np.array([0, 1]),
        node_keys=np.array([name_key("slow"), name_key("fast")]),
        model_keys=np.array([name_key("small"), name_key("large")]),
        parameters_billions=np.array([1.0, 8.0]),
        slots=np.array([1, 1]),
        watts=np.array([5.0, 50.0]),
        usd_per_second=np.array([0.0, 0.25]),
        quality=np.array([[0.4, 0.8], [0.5, 0.9]]),
        correct=np.array([[0.0, 1.0], [1.0, 1.0]]),
        seconds=np.array([[[2.0, math.inf], [8.0, 4.0]], [[2.0, math.inf], [8.0, 4.0]]]),
        noise=noise,
    )


def arriving(*times: float) -> Workload:
    count = len(times)
    return Workload(np.array(times), np.zeros(count, dtype=np.int64), np.zeros(count))


@dataclass
class Always:
    """Sends everything to one destination while it can, else anywhere; keeps what it saw."""

    destination: int
    name: str = "always"

    def __post_init__(self) -> None:
        self.seen: list[RoutingProblem] = []

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        self.seen.append(problem)
        chosen = [
            UNASSIGNED
            if not row.any()
            else self.destination
            if row[self.destination]
            else int(row.argmax())
            for row in problem.feasible
        ]
        return Decision(np.array(chosen, dtype=np.int64))


def test_each_arrival_sees_the_queue_that_the_earlier_ones_left() -> None:
    policy = Always(2)
    found = simulate(scenario(), arriving(0.0, 1.0, 9.0), policy, WEIGHTS)
    np.testing.assert_allclose(found.started, [0.0, 4.0, 9.0])
    np.testing.assert_allclose(found.finished, [4.0, 8.0, 13.0])
    np.testing.assert_allclose(found.waiting_seconds, [0.0, 3.0, 0.0])
    assert [problem.backlog_seconds[1] for problem in policy.seen] == [0.0, 3.0, 0.0]
    assert found.energy_joules == pytest.approx(12.0 * 50.0)
    assert found.cost_usd == pytest.approx(12.0 * 0.25)
    np.testing.assert_allclose(found.utilisation, [0.0, 12.0 / 13.0])
    # Quality is best, and latencies are 2, 8 and 4: alpha - beta * Phi(1 / 3).
    late = math.expm1(1.0) / math.expm1(3.0)
    assert found.reward[0] == pytest.approx(0.8 - 0.3 * late)


def test_a_queue_that_stretches_the_scale_of_latency_does_not_hide_in_the_unloaded_reward() -> None:
    found = simulate(scenario(), arriving(0.0, 0.0, 0.0), Always(2), WEIGHTS)
    # The third waits 8 s and then takes 4, and is the slowest candidate itself; an idle fleet
    # offers 2 to 8 s.
    np.testing.assert_allclose(found.slowest_seconds, [8.0, 8.0, 12.0])
    assert found.reward[2] == pytest.approx(0.8 - 0.3)
    slope = 3.0 * math.exp(3.0) / math.expm1(3.0)  # of Phi at 1
    beyond = (12.0 - 2.0) / (8.0 - 2.0) - 1.0
    assert found.unloaded_reward[2] == pytest.approx(0.8 - 0.3 * (1.0 + slope * beyond))
    assert found.unloaded_reward[0] == found.reward[0]


def test_a_window_gathers_and_a_full_batch_is_decided_at_once() -> None:
    policy = Always(2)
    times = arriving(0.0, 0.5, 0.6, 0.7, 5.0)
    found = simulate(scenario(), times, policy, WEIGHTS, window=SimulatedWindow(1.0, most=3))
    assert [problem.n_requests for problem in policy.seen] == [3, 1, 1]
    # Decided at 0.6 (full), 1.7 and 6.0 (after a second).
    np.testing.assert_allclose(found.started, [0.6, 4.6, 8.6, 12.6, 16.6])
    assert found.served.all()


def test_a_failure_sends_what_was_there_elsewhere_and_counts_the_loss() -> None:
    found = simulate(
        scenario(), arriving(0.0, 1.0), Always(2), WEIGHTS, outages=[Outage(1, 3.0, 100.0)]
    )
    assert found.requeued == 2
    assert found.destination.tolist() == [0, 0]
    np.testing.assert_allclose(found.started, [3.0, 5.0])
    np.testing.assert_allclose(found.finished, [5.0, 7.0])
    assert found.correct.tolist() == [0.0, 0.0]
    assert found.wasted_joules == pytest.approx(3.0 * 50.0)
    assert found.energy_joules == pytest.approx(3.0 * 50.0 + 4.0 * 5.0)


def test_requests_wait_for_a_node_to_join_and_are_unserved_if_none_does() -> None:
    away = [Outage(0, 0.0), Outage(1, 0.0, 20.0)]
    found = simulate(scenario(), arriving(1.0), Always(2), WEIGHTS, outages=away)
    assert found.started.tolist() == [20.0]
    never = [Outage(0, 0.0), Outage(1, 0.0)]
    found = simulate(scenario(), arriving(1.0), Always(2), WEIGHTS, outages=never)
    assert not found.served.any()
    assert found.destination.tolist() == [UNASSIGNED]


@pytest.mark.parametrize("outage", [Outage(2, 0.0), Outage(0, 3.0, 2.0), Outage(0, -1.0)])
def test_an_outage_that_does_not_fit_is_refused(outage: Outage) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        simulate(scenario(), arriving(0.0), Always(2), WEIGHTS, outages=[outage])


def test_a_policy_that_sends_to_a_node_that_is_down_is_told_on() -> None:
    class Stubborn(Always):
        def decide(
            self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget
        ) -> Decision:
            return Decision(np.array([2], dtype=np.int64))

    with pytest.raises(ValueError, match="always sent a request to a node that is down"):
        simulate(scenario(), arriving(1.0), Stubborn(2), WEIGHTS, outages=[Outage(1, 0.0)])


@pytest.mark.parametrize("name", ["random", "greedy-reward", "memetic"])
def test_the_same_seed_gives_the_same_outcome(name: str) -> None:
    def once() -> QueryOutcome:
        rng = np.random.default_rng(4)
        workload = workload_of(poisson(12, 1.0, rng), 2, rng)
        outages = [Outage(1, 4.0, 9.0)]
        window = SimulatedWindow(1.0) if name == "memetic" else None
        policy = policy_named(name)
        return simulate(scenario(0.3), workload, policy, WEIGHTS, 7, window, outages)

    first, second = once(), once()
    assert first.served.all()
    for part in fields(QueryOutcome):
        if part.name != "decision_seconds":
            np.testing.assert_array_equal(getattr(first, part.name), getattr(second, part.name))


def test_a_placed_model_needs_a_time() -> None:
    whole = scenario()
    parts = {part.name: getattr(whole, part.name) for part in fields(Scenario)}
    with pytest.raises(ValueError, match="no predicted time"):
        Scenario(**{**parts, "node_of": np.array([0, 1, 1]), "model_of": np.array([0, 0, 1])})


def test_a_request_that_has_streamed_fails_with_its_node_as_in_the_controller() -> None:
    whole = replace(scenario(), first_token_ratio=np.full((2, 2), 0.5))
    # 3 of 4 s were served: tokens were seen. The one that waited starts again.
    found = simulate(whole, arriving(0.0, 1.0), Always(2), WEIGHTS, outages=[Outage(1, 3.0)])
    assert found.failed.tolist() == [True, False]
    assert found.served.tolist() == [False, True]
    assert found.requeued == 1
    early = simulate(whole, arriving(0.0, 1.0), Always(2), WEIGHTS, outages=[Outage(1, 1.5)])
    assert not early.failed.any()
    assert early.requeued == 2


def test_a_request_fails_when_its_third_node_goes_away() -> None:
    away = [Outage(1, 1.0 + 2.0 * n, 2.0 + 2.0 * n) for n in range(3)]
    whole = replace(scenario(), slots=np.array([1, 1]))
    only = [Outage(0, 0.0)]  # so that it waits for the node that keeps failing
    found = simulate(whole, arriving(0.5), Always(2), WEIGHTS, outages=[*only, *away])
    assert found.failed.tolist() == [True]
    assert found.requeued == 2


def test_an_unnoticed_failure_costs_the_lease() -> None:
    outage = Outage(1, 3.0, 100.0, unnoticed_seconds=10.0)
    found = simulate(scenario(), arriving(0.0, 5.0, 20.0), Always(2), WEIGHTS, outages=[outage])
    # Both are routed again at 13 s, to the node that is left; the third is there in time.
    np.testing.assert_allclose(found.started, [13.0, 15.0, 20.0])
    assert found.requeued == 2
    assert found.wasted_joules == pytest.approx(3.0 * 50.0)


def test_a_node_that_returns_before_anybody_noticed_has_lost_its_requests() -> None:
    outage = Outage(1, 3.0, 5.0, unnoticed_seconds=10.0)
    found = simulate(scenario(), arriving(0.0), Always(2), WEIGHTS, outages=[outage])
    assert found.requeued == 1
    assert found.started[0] == 5.0


def test_events_of_a_scenario_become_outages() -> None:
    events = [
        NodeEvent(0, 5.0, False),
        NodeEvent(0, 9.0, True),
        NodeEvent(1, 4.0, True),
        NodeEvent(2, 6.0, False),
    ]
    assert outages_of(events, 2.0) == [
        Outage(1, 0.0, 4.0),
        Outage(0, 5.0, 9.0, 2.0),
        Outage(2, 6.0, math.inf, 2.0),
    ]


def test_true_times_are_those_that_pass() -> None:
    whole = replace(scenario(), true_seconds=scenario().seconds * 2.0)
    policy = Always(2)
    found = simulate(whole, arriving(0.0, 1.0), policy, WEIGHTS)
    np.testing.assert_allclose(found.inference_seconds, [8.0, 8.0])
    assert policy.seen[1].backlog_seconds[1] == 3.0  # as predicted


def test_idle_power_is_counted_until_the_last_request_ends() -> None:
    whole = replace(scenario(), idle_watts=np.array([2.0, 10.0]))
    found = simulate(whole, arriving(0.0, 9.0), Always(2), WEIGHTS)
    assert found.idle_joules == pytest.approx(13.0 * 2.0 + 5.0 * 10.0)


def test_the_problem_is_what_the_checked_constructor_would_make() -> None:
    whole = scenario()
    source = ProblemSource(whole, WEIGHTS)
    waits, up = np.array([1.5, 0.0]), np.array([True, False])
    for queries in ([1], [1, 0, 1]):
        fast = source.problem(queries, waits.copy(), up)
        parts = {part.name: getattr(fast, part.name) for part in fields(RoutingProblem)}
        checked = RoutingProblem(**parts)
        for name in parts:
            if name not in ("metadata", "normalisation", "bounds"):
                ours = getattr(fast, name)
                np.testing.assert_array_equal(ours, getattr(checked, name))
                assert not ours.flags.writeable
                assert ours.flags.c_contiguous
        assert fast.feasible.tolist() == [[True, True, False]] * len(queries)
        np.testing.assert_array_equal(fast.quality, whole.quality[queries][:, whole.model_of])


def test_rewards_are_those_that_greedy_reward_sees() -> None:
    rng = np.random.default_rng(2)
    workload = workload_of(poisson(40, 1.0, rng), 2, rng)
    expected = []

    class Watching:
        name = "watching"

        def decide(
            self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget
        ) -> Decision:
            allowed = np.flatnonzero(problem.feasible[0])
            late = problem.latency_seconds[0] + problem.backlog_seconds[problem.node_of]
            gained = rewards(problem.quality[0, allowed], late[allowed])
            pick = int(rng.integers(allowed.size))
            expected.append(gained[pick])
            return Decision(np.array([allowed[pick]]))

    found = simulate(scenario(), workload, Watching(), WEIGHTS, outages=[Outage(0, 5.0, 9.0)])
    # The last decision of each request counts; these are in order of arrival but for those again.
    if found.requeued == 0:
        np.testing.assert_allclose(found.reward, expected)
    else:
        assert set(np.round(found.reward, 9)) <= set(np.round(expected, 9))


def test_a_query_that_is_not_there_is_refused() -> None:
    strange = Workload(np.zeros(1), np.array([2]), np.zeros(1))
    with pytest.raises(ValueError, match=r"outside 0\.\.1"):
        simulate(scenario(), strange, Always(2), WEIGHTS)
