from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.routing.completion import node_completion_seconds
from controller.routing.evaluator import evaluate
from controller.routing.memetic.loads import (
    empty_loads,
    finish,
    load_assignment,
    makespan,
    move,
    separable_cost,
)
from controller.routing.node_loads import Costs
from controller.routing.objective import objectives, scalarise
from controller.routing.problem import IntArray, RoutingProblem
from tests.unit.controller.routing.problems import problems


def legal_start(problem: RoutingProblem, random: Any) -> tuple[Costs, IntArray, IntArray]:
    """The weighed problem, its rows, and a legal assignment of them."""
    costs, _, rows, _ = scalarise(problem)
    x = np.array([random.choice(np.flatnonzero(problem.feasible[r]).tolist()) for r in rows])
    return costs, rows, x.astype(np.int64)


def whole(problem: RoutingProblem, rows: IntArray, x: IntArray) -> IntArray:
    assignment = np.full(problem.n_requests, -1, dtype=np.int64)
    assignment[rows] = x
    return assignment


def objective(problem: RoutingProblem, rows: IntArray, x: IntArray) -> float:
    terms = evaluate(problem, whole(problem, rows, x)[None, :])
    return float(objectives(problem, terms, scalarise(problem).bounds)[0])


@settings(deadline=None)
@given(problems(max_requests=8), st.randoms())
def test_loads_after_many_moves_are_those_of_the_assignment(
    problem: RoutingProblem, random: Any
) -> None:
    costs, rows, x = legal_start(problem, random)
    if not rows.size:
        return
    loads = empty_loads(rows.size, problem.n_nodes)
    load_assignment(costs, loads, x)
    for _ in range(30):
        i = random.randrange(rows.size)
        d = random.choice(np.flatnonzero(problem.feasible[rows[i]]).tolist())
        move(costs, loads, i, d)
        x[i] = d
    expected = node_completion_seconds(problem, whole(problem, rows, x)[None, :])[0]
    nodes = [finish(costs, loads, n) for n in range(problem.n_nodes)]
    assert nodes == pytest.approx(expected.tolist())
    assert makespan(costs, loads) == pytest.approx(expected.max())
    assert loads.x.tolist() == x.tolist()


@settings(deadline=None)
@given(problems(max_requests=8), st.randoms())
def test_loads_give_the_objective_of_the_evaluator(problem: RoutingProblem, random: Any) -> None:
    costs, rows, x = legal_start(problem, random)
    if not rows.size:
        return
    loads = empty_loads(rows.size, problem.n_nodes)
    load_assignment(costs, loads, x)
    assert objective(problem, rows, x) == pytest.approx(
        costs.constant
        + separable_cost(costs, loads.x)
        + costs.time_weight * makespan(costs, loads),
        abs=1e-9,
    )
