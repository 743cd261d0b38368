"""Each rule on a problem small enough to see the answer; the contract suite covers the rest."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controller.routing.baselines.greedy_reward import rewards
from controller.routing.baselines.optllm import knee, pareto_front
from controller.routing.baselines.routellm import RouteLlmPolicy
from controller.routing.baselines.uniroute import UniRoutePolicy
from controller.routing.policies import policy_named
from controller.routing.policy import Budget
from controller.routing.ppo.observation import (
    DRLM_WEIGHTS,
    candidate_features,
    candidates_of,
)
from controller.routing.problem import MissingMetadata, ProblemMetadata, RoutingProblem

# Destinations: 0 and 1 are replicas of a small model on edge nodes, 2 is a big one in the cloud.
BASE = {
    "quality": np.array([[0.6, 0.6, 0.9]] * 4),
    "cost_usd": np.array([[0.0, 0.0, 1.0]] * 4),
    "energy_joules": np.ones((4, 3)),
    "work_seconds": np.array([[2.0, 2.0, 1.0]] * 4),
    "latency_seconds": np.array([[2.0, 2.5, 1.5]] * 4),
    "network_seconds": np.zeros((4, 3)),
    "node_of": np.arange(3),
    "backlog_seconds": np.array([0.0, 1.0, 0.0]),
    "feasible": np.ones((4, 3), dtype=np.bool_),
    "weights": np.full(4, 0.25),
}
METADATA = ProblemMetadata(
    node_is_edge=np.array([True, True, False]),
    model_of=np.array([0, 0, 1]),
    parameters_billions=np.array([1.0, 1.0, 20.0]),
)


def problem(metadata: ProblemMetadata = METADATA, **changes: Any) -> RoutingProblem:
    return RoutingProblem(**{**BASE, **changes}, metadata=metadata)


def chosen(name: str, asked: RoutingProblem, seed: int = 0) -> list[int]:
    decision = policy_named(name).decide(asked, np.random.default_rng(seed), Budget())
    return [int(d) for d in decision.assignment]


def test_round_robin_takes_turns_from_a_drawn_start() -> None:
    start = chosen("round-robin", problem())
    assert start in ([0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2])
    assert len({tuple(chosen("round-robin", problem(), seed)) for seed in range(20)}) == 3


def test_round_robin_skips_what_is_not_feasible() -> None:
    feasible = np.ones((4, 3), dtype=np.bool_)
    feasible[:, 1] = False
    turns = chosen("round-robin", problem(feasible=feasible))
    assert turns in ([0, 2, 0, 2], [2, 0, 2, 0])


def test_least_loaded_counts_the_backlog_and_the_batch() -> None:
    """Backlogs 0, 1, 0: to 2 (less work), to 0, then all at 2, 1, 1: to 2, then to 1."""
    assert chosen("least-loaded", problem()) == [2, 0, 2, 1]


def test_placement_keeps_to_its_kind_of_node() -> None:
    assert chosen("cloud-only", problem()) == [2, 2, 2, 2]
    assert chosen("edge-only", problem()) == [0, 1, 0, 1]


def test_placement_falls_back_where_its_kind_is_not_feasible() -> None:
    feasible = np.ones((4, 3), dtype=np.bool_)
    feasible[1, 2] = False
    assert chosen("cloud-only", problem(feasible=feasible)) == [2, 0, 2, 2]


@pytest.mark.parametrize(
    ("name", "array"),
    [("edge-only", "node_is_edge"), ("cloud-only", "node_is_edge"), ("routellm", "model_of")],
)
def test_policy_names_the_array_it_misses(name: str, array: str) -> None:
    with pytest.raises(MissingMetadata, match=array) as caught:
        chosen(name, problem(ProblemMetadata()))
    assert caught.value.policy == name


def test_random_draws_every_feasible_destination_and_no_other() -> None:
    feasible = np.ones((4, 3), dtype=np.bool_)
    feasible[:, 1] = False
    drawn = {d for seed in range(20) for d in chosen("random", problem(feasible=feasible), seed)}
    assert drawn == {0, 2}


def test_high_accuracy_takes_the_best_model_of_the_class() -> None:
    assert chosen("high-accuracy", problem()) == [2, 2, 2, 2]
    by_class = np.array([[0.5, 0.7, 0.6]] * 4)
    assert chosen("high-accuracy", problem(replace(METADATA, class_quality=by_class))) == [1] * 4


def test_fastest_ignores_the_queue() -> None:
    crowded = problem(backlog_seconds=np.array([0.0, 0.0, 100.0]))
    assert chosen("fastest", crowded) == [2, 2, 2, 2]


def test_uniroute_weighs_error_and_normalised_cost() -> None:
    """0.4 against 0.1 + 0.05: the big model; with a difference of 0.04, the first small one."""
    assert chosen("uniroute", problem()) == [2, 2, 2, 2]
    close = problem(quality=np.array([[0.6, 0.6, 0.64]] * 4))
    assert chosen("uniroute", close) == [0, 0, 0, 0]
    assert chosen("uniroute-fair", close) == [0, 1, 0, 1]


def test_uniroute_prefers_the_errors_of_the_cluster() -> None:
    by_cluster = replace(METADATA, cluster_error=np.array([[0.9, 0.2, 0.5]] * 4))
    assert chosen("uniroute", problem(by_cluster)) == [1, 1, 1, 1]


def test_uniroute_without_any_price_goes_by_error_alone() -> None:
    free = problem(cost_usd=np.zeros((4, 3)))
    decision = UniRoutePolicy(cost_weight=9.0).decide(free, np.random.default_rng(0), Budget())
    assert decision.assignment.tolist() == [2, 2, 2, 2]


def test_routellm_asks_the_strong_model_where_it_is_probably_better() -> None:
    quality = np.array([[0.6, 0.6, 0.9], [0.6, 0.6, 0.55], [0.9, 0.9, 0.9], [0.1, 0.1, 0.2]])
    assert chosen("routellm", problem(quality=quality)) == [2, 0, 0, 2]


def test_routellm_with_a_threshold_wants_more_than_a_bare_majority() -> None:
    """P = 0.9 * 0.4 + (0.9 * 0.6 + 0.1 * 0.4) / 2 = 0.65."""
    for threshold, expected in ((0.64, 2), (0.66, 0)):
        decision = RouteLlmPolicy(threshold=threshold).decide(
            problem(), np.random.default_rng(0), Budget()
        )
        assert decision.assignment.tolist() == [expected] * 4


def test_routellm_without_the_strong_model_takes_a_weak_one() -> None:
    feasible = np.ones((4, 3), dtype=np.bool_)
    feasible[0, 2] = False
    feasible[1, :2] = False
    quality = np.array([[0.6, 0.6, 0.1]] * 4)
    answer = chosen("routellm", problem(feasible=feasible, quality=quality))
    assert answer == [0, 2, 0, 0]


def test_front_holds_what_nothing_dominates_and_the_knee_bends_most() -> None:
    quality = np.array([0.2, 0.8, 0.7, 0.9, 0.8])
    latency = np.array([1.0, 2.0, 3.0, 10.0, 2.0])
    front = pareto_front(quality, latency)
    assert front.tolist() == [0, 1, 3]
    assert front[knee(quality[front], latency[front])] == 1
    assert knee(np.array([0.4]), np.array([1.0])) == 0
    assert knee(np.array([0.4, 0.6]), np.array([1.0, 2.0])) == 1


def test_optllm_takes_the_knee() -> None:
    faster = problem(latency_seconds=np.array([[1.0, 2.5, 1.5]] * 4))
    assert chosen("optllm", faster) == [2, 2, 2, 2]


def test_reward_of_a_step_is_that_worked_by_hand() -> None:
    """Scaled quality 0, 0.5, 1 and latency 0, 0.25, 1."""
    found = rewards(np.array([0.2, 0.4, 0.6]), np.array([1.0, 2.0, 5.0]))
    middle = 0.4 - 0.3 * (np.exp(0.75) - 1.0) / (np.exp(3.0) - 1.0)
    assert found == pytest.approx([0.0, middle, 0.5])
    assert rewards(np.array([0.5, 0.5]), np.array([3.0, 3.0])).tolist() == [0.0, 0.0]


def test_greedy_reward_is_the_argmax_of_what_learned_policies_are_rewarded_by() -> None:
    """Also where the network takes its time: both see the same latency."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        asked = problem(
            quality=rng.random((4, 3)),
            latency_seconds=rng.exponential(3.0, (4, 3)),
            network_seconds=rng.exponential(3.0, (4, 3)),
            weights=np.array(DRLM_WEIGHTS),
        )
        first = asked.backlog_seconds
        candidates, destinations = candidates_of(asked, 0, first)
        learned = int(destinations[np.argmax(candidate_features(candidates)[1][0])])
        assert chosen("greedy-reward", asked)[0] == learned


def test_greedy_reward_leaves_a_destination_once_its_queue_is_long() -> None:
    slow = np.array([[5.0, 5.0, 5.0]] * 4)
    near = np.array([[0.8, 0.5, 0.9]] * 4)
    asked = problem(work_seconds=slow, latency_seconds=slow, quality=near)
    answer = chosen("greedy-reward", asked)
    assert answer[0] == 2
    assert 0 in answer
