import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.routing.completion import node_completion_seconds
from controller.routing.evaluator import evaluate, evaluate_one
from controller.routing.objective import (
    bounds_of,
    normalised,
    objectives,
    scalarise,
)
from controller.routing.policy import UNASSIGNED
from controller.routing.problem import Normalisation, ProblemMetadata, RoutingProblem
from tests.unit.controller.routing.problems import (
    every_assignment,
    loop_terms,
    permuted,
    problems,
    random_problem,
)

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "routing_evaluator.json").read_text())


def golden_problem(**changes: Any) -> RoutingProblem:
    arrays = {name: np.array(values) for name, values in GOLDEN["problem"].items()}
    feasible = np.ones(arrays["quality"].shape, dtype=np.bool_)
    return RoutingProblem(
        **{**arrays, "feasible": feasible, "weights": np.full(4, 0.25), **changes}
    )


@pytest.mark.parametrize("case", GOLDEN["assignments"], ids=lambda case: str(case["assignment"]))
def test_terms_are_those_worked_by_hand(case: dict[str, Any]) -> None:
    problem = golden_problem()
    chosen = np.array(case["assignment"])
    terms = evaluate_one(problem, chosen)
    assert terms.quality_loss == pytest.approx(case["quality_loss"])
    assert terms.cost_usd == pytest.approx(case["cost_usd"])
    assert terms.energy_joules == pytest.approx(case["energy_joules"])
    assert terms.completion_seconds == pytest.approx(max(case["node_completion_seconds"]))
    nodes = node_completion_seconds(problem, chosen[None, :])[0]
    assert nodes == pytest.approx(case["node_completion_seconds"])


@pytest.mark.parametrize("name", ["payoff", "minmax"])
def test_bounds_are_those_worked_by_hand(name: str) -> None:
    problem = golden_problem(normalisation=Normalisation(name))
    assert bounds_of(problem) == pytest.approx(np.array(GOLDEN[name]["bounds"]))


def test_single_term_assignments_are_those_worked_by_hand() -> None:
    assert scalarise(golden_problem()).seeds.tolist() == GOLDEN["payoff"]["assignments"]


@settings(deadline=None)
@given(problems(), st.randoms())
def test_population_is_scored_like_plain_loops(problem: RoutingProblem, random: Any) -> None:
    assignments = np.array(
        [
            [random.randrange(-1, problem.n_destinations) for _ in range(problem.n_requests)]
            for _ in range(5)
        ]
    )
    expected = np.array([loop_terms(problem, assignment) for assignment in assignments])
    assert evaluate(problem, assignments) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@settings(deadline=None)
@given(problems(max_requests=4, max_nodes=3))
def test_weighed_problem_has_the_objective_of_the_evaluator(problem: RoutingProblem) -> None:
    costs, bounds, rows, _ = scalarise(problem)
    assignments = every_assignment(problem)
    terms = evaluate(problem, assignments)
    expected = objectives(problem, terms, bounds)
    separable = costs.cost[np.arange(rows.size)[None, :], assignments[:, rows]].sum(axis=1)
    weighed = costs.constant + separable + costs.time_weight * terms[:, 3]
    assert weighed == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(problems())
def test_more_backlog_never_finishes_anything_sooner(problem: RoutingProblem) -> None:
    later = replace(problem, backlog_seconds=problem.backlog_seconds + 1.5)
    chosen = np.where(problem.routable, problem.feasible.argmax(axis=1), UNASSIGNED)
    before = node_completion_seconds(problem, chosen[None, :])[0]
    used = before > 0.0
    after = node_completion_seconds(later, chosen[None, :])[0]
    assert after[used] == pytest.approx(before[used] + 1.5)
    assert (
        evaluate_one(later, chosen).completion_seconds
        >= evaluate_one(problem, chosen).completion_seconds
    )


@settings(deadline=None)
@given(problems(), st.randoms())
def test_permuting_requests_and_destinations_changes_no_term(
    problem: RoutingProblem, random: Any
) -> None:
    rows = np.array(random.sample(range(problem.n_requests), problem.n_requests))
    columns = np.array(random.sample(range(problem.n_destinations), problem.n_destinations))
    chosen = np.array([random.randrange(problem.n_destinations) for _ in rows])
    place = np.argsort(columns)  # old column -> new column
    other = evaluate(permuted(problem, rows, columns), place[chosen[rows]][None, :])
    assert other == pytest.approx(evaluate(problem, chosen[None, :]), rel=1e-12, abs=1e-12)


@settings(deadline=None)
@given(problems())
def test_node_with_one_slot_is_done_when_its_queue_is(problem: RoutingProblem) -> None:
    """Where work is latency, first come first served ends at the bound but for the transfer."""
    serial = replace(
        problem,
        latency_seconds=problem.work_seconds,
        network_seconds=np.zeros_like(problem.network_seconds),
        node_of=np.zeros(problem.n_destinations, dtype=np.int64),
        backlog_seconds=problem.backlog_seconds[:1],
        metadata=ProblemMetadata(),
    )
    chosen = np.zeros(problem.n_requests, dtype=np.int64)
    expected = serial.backlog_seconds[0] + serial.work_seconds[:, 0].sum()
    assert evaluate_one(serial, chosen).completion_seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    "assignments",
    [np.array([[0, 1]]), np.array([[0, 1, 3]]), np.array([[0, -2, 1]]), np.array([[0.0, 1, 2]])],
)
def test_assignment_that_names_no_destination_is_refused(assignments: Any) -> None:
    with pytest.raises(ValueError, match="assignment"):
        evaluate(golden_problem(), assignments)


@pytest.mark.parametrize("normalisation", Normalisation)
def test_term_that_is_the_same_everywhere_counts_nothing(normalisation: Normalisation) -> None:
    """All prices zero, all qualities equal: J has energy and time left."""
    problem = replace(
        random_problem(5, 6, 4, normalisation=normalisation),
        cost_usd=np.zeros((6, 4)),
        quality=np.full((6, 4), 0.1),
    )
    bounds = bounds_of(problem)
    assert bounds[1].tolist() == [0.0, 0.0]
    assert bounds[0, 0] == bounds[0, 1]
    terms = evaluate(problem, every_assignment(problem)[::97])
    shares = normalised(terms, bounds)
    assert (shares[:, :2] == 0.0).all()
    assert (shares[:, 2] != 0.0).any()


@pytest.mark.parametrize("normalisation", Normalisation)
def test_problem_where_all_pairs_are_equal_has_objective_zero(
    normalisation: Normalisation,
) -> None:
    """One request: then no term can differ."""
    ones = np.ones((1, 3))
    problem = RoutingProblem(
        ones, ones, ones, ones, ones, ones, np.arange(3), np.zeros(3), ones > 0, np.full(4, 0.25),
        normalisation,
    )  # fmt: skip
    terms = evaluate(problem, every_assignment(problem))
    assert objectives(problem, terms, bounds_of(problem)).tolist() == [0.0, 0.0, 0.0]


def test_batch_in_which_nothing_is_routable_has_no_terms() -> None:
    problem = golden_problem(feasible=np.zeros((3, 3), dtype=np.bool_))
    nowhere = np.full(3, UNASSIGNED)
    assert loop_terms(problem, nowhere).tolist() == [0.0] * 4
    assert evaluate(problem, nowhere[None, :]).tolist() == [[0.0] * 4]
    assert bounds_of(problem).tolist() == [[0.0, 0.0]] * 4


def test_given_bounds_are_used_as_they_are() -> None:
    bounds = np.array([[0.0, 2.0], [0.0, 0.0], [9.0, 45.0], [0.0, 10.0]])
    problem = golden_problem(bounds=bounds, weights=np.array([0.4, 0.3, 0.2, 0.1]))
    assert bounds_of(problem).tolist() == bounds.tolist()
    terms = evaluate(problem, np.array([[0, 1, 2]]))
    expected = 0.4 * 1.0 / 2.0 + 0.2 * (28.0 - 9.0) / 36.0 + 0.1 * 7.2 / 10.0
    assert objectives(problem, terms, bounds)[0] == pytest.approx(expected)


@settings(deadline=None)
@given(problems())
def test_random_bounds_enclose_a_legal_assignment_and_are_repeatable(
    problem: RoutingProblem,
) -> None:
    drawn = replace(problem, normalisation=Normalisation.RANDOM)
    bounds = bounds_of(drawn)
    np.testing.assert_array_equal(bounds, bounds_of(drawn))
    widest = bounds_of(replace(problem, normalisation=Normalisation.MINMAX))
    np.testing.assert_array_equal(bounds[:3, 0], widest[:3, 0])
    assert (bounds[:3, 1] <= widest[:3, 1] + 1e-9).all()
