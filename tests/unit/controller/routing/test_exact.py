import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from controller.routing.exact import SolverMissing, solve_exactly, solve_programme
from controller.routing.objective import scalarise
from controller.routing.problem import RoutingProblem
from tests.unit.controller.routing.problems import (
    least_objective,
    objective_of,
    problems,
    random_problem,
)


@settings(deadline=None, max_examples=40)
@given(problems(max_requests=5, max_nodes=3))
def test_small_problems_are_solved_to_the_optimum_by_trying_everything(
    problem: RoutingProblem,
) -> None:
    solution = solve_exactly(problem, np.random.default_rng(0))
    optimum = least_objective(problem)
    assert solution.is_optimal
    assert solution.objective == pytest.approx(optimum, abs=1e-7)
    assert objective_of(problem, solution.assignment) == pytest.approx(solution.objective)
    assert solution.lower_bound <= optimum + 1e-9


def test_programme_without_an_incumbent_to_cut_it_down_has_the_same_optimum() -> None:
    """The cut-off is what the result must not depend on."""
    for seed in range(6):
        problem = random_problem(seed, 8, 3, 2, serial=seed % 2 == 0)
        costs = scalarise(problem).costs
        found, dual, _ = solve_programme(costs, 1e6, 30.0)
        assert found is not None
        expected = solve_exactly(problem, np.random.default_rng(0)).objective
        assert objective_of(problem, found) == pytest.approx(expected, abs=1e-6)
        assert dual == pytest.approx(expected, abs=1e-6)


def test_network_of_one_request_adds_to_the_latency_of_another() -> None:
    """T = max latency + max network of a node, though no single request has both."""
    problem = RoutingProblem(
        quality=np.array([[1.0, 0.0], [1.0, 0.0]]),
        cost_usd=np.zeros((2, 2)), energy_joules=np.zeros((2, 2)),
        work_seconds=np.full((2, 2), 0.1),
        latency_seconds=np.array([[5.0, 5.0], [1.0, 1.0]]),
        network_seconds=np.array([[0.0, 0.0], [4.0, 4.0]]),
        node_of=np.array([0, 1]), backlog_seconds=np.zeros(2), feasible=np.ones((2, 2), bool),
        weights=np.array([0.2, 0.0, 0.0, 0.8]), bounds=np.array([[0.0, 2.0]] * 3 + [[5.0, 9.0]]),
    )  # fmt: skip
    solution = solve_exactly(problem, np.random.default_rng(0))
    assert sorted(solution.assignment.tolist()) == [0, 1]
    assert solution.objective == pytest.approx(0.1)


def test_bad_time_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="time limit"):
        solve_exactly(random_problem(0, 2, 2), np.random.default_rng(0), 0.0)


def test_missing_solver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(SolverMissing, match="SciPy"):
        solve_exactly(random_problem(0, 3, 2, serial=True), np.random.default_rng(0))


def test_request_that_goes_nowhere_is_left_out() -> None:
    problem = random_problem(0, 4, 3)
    feasible = problem.feasible.copy()
    feasible[2] = False
    solution = solve_exactly(replace(problem, feasible=feasible), np.random.default_rng(0))
    assert solution.assignment[2] == -1
    assert (solution.assignment[[0, 1, 3]] >= 0).all()
