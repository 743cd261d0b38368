"""The completion formula: one place, and everybody who needs it agrees with that place."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import controller
from controller.routing import node_loads
from controller.routing.compiled import compiled
from controller.routing.completion import node_completion_seconds, node_finish, own_finish
from controller.routing.evaluator import evaluate_one
from controller.routing.exact import solve_programme
from controller.routing.memetic import chromosome, loads
from controller.routing.node_loads import Costs
from controller.routing.objective import scalarise
from controller.routing.problem import FloatArray, IntArray, RoutingProblem
from tests.unit.controller.routing.problems import every_assignment, loop_terms, problems

SOURCES = Path(controller.__file__).parent


@compiled
def finishes(costs: Costs, x: IntArray) -> FloatArray:
    """float64[4, N] and the last row's own: each node by each compiled way to the formula.

    Rows: added one by one; by `Loads`; by `Loads` with the first request taken off and added; by
    `Loads` with the first request exchanged for itself.
    """
    n_nodes = costs.backlog.size
    found = np.zeros((4, n_nodes))
    plain = node_loads.no_loads(n_nodes)
    kept = loads.empty_loads(x.size, n_nodes)
    less = loads.empty_loads(x.size, n_nodes)
    loads.load_assignment(costs, kept, x)
    loads.load_assignment(costs, less, x)
    loads.take(costs, less, 0)
    for r in range(x.size):
        node_loads.add(costs, plain, r, x[r])
    for n in range(n_nodes):
        found[0, n] = node_loads.finish_of(costs, plain, n)
        for k in range(1, 4):
            found[k, n] = loads.finish(costs, kept, n)
    home = costs.node_of[x[0]]
    found[2, home] = loads.finish_with(costs, less, home, 0, x[0])
    found[3, home] = loads.finish_exchanged(costs, kept, home, 0, 0, x[0])
    return found


@compiled
def finish_after_leaving(costs: Costs, x: IntArray, r: int) -> Any:
    """float64, seconds: the node of request r without it."""
    kept = loads.empty_loads(x.size, costs.backlog.size)
    loads.load_assignment(costs, kept, x)
    return loads.finish_without(costs, kept, costs.node_of[x[r]], r)


@compiled
def alone(costs: Costs) -> FloatArray:
    """float64[R, D]: each request as the whole batch."""
    found = np.zeros(costs.cost.shape)
    for r in range(found.shape[0]):
        for d in range(found.shape[1]):
            found[r, d] = node_loads.alone_seconds(costs, r, d)
    return found


@compiled
def fitness(costs: Costs, x: IntArray) -> Any:
    """float64: J as the paper's search scores it."""
    return chromosome.fitness(costs, x, node_loads.no_loads(costs.backlog.size))


def drawn(problem: RoutingProblem, random: Any) -> tuple[Costs, IntArray, IntArray]:
    """The weighed problem, a whole legal assignment, and the part of it that is routable."""
    scalarised = scalarise(problem)
    whole = np.full(problem.n_requests, -1, dtype=np.int64)
    for r in scalarised.requests:
        whole[r] = random.choice(np.flatnonzero(problem.feasible[r]).tolist())
    return scalarised.costs, whole, whole[scalarised.requests]


@settings(deadline=None)
@given(problems(max_requests=8), st.randoms())
def test_every_way_to_a_node_s_completion_is_the_definition(
    problem: RoutingProblem, random: Any
) -> None:
    costs, whole, x = drawn(problem, random)
    if not x.size:
        return
    expected = node_completion_seconds(problem, whole[None, :])[0]
    assert expected.max() == pytest.approx(loop_terms(problem, whole)[3], rel=1e-12)
    found = finishes(costs, x)
    np.testing.assert_array_equal(found[0], expected)
    assert found == pytest.approx(np.tile(expected, (4, 1)), rel=1e-12)
    for r in range(x.size):
        less = whole.copy()
        less[scalarise(problem).requests[r]] = -1
        without = node_completion_seconds(problem, less[None, :])[0]
        assert finish_after_leaving(costs, x, r) == pytest.approx(
            without[problem.node_of[x[r]]], rel=1e-9, abs=1e-9
        )


@settings(deadline=None)
@given(problems())
def test_request_alone_finishes_by_the_formula_and_never_before_its_own_latency(
    problem: RoutingProblem,
) -> None:
    costs, _, rows, _ = scalarise(problem)
    if not rows.size:
        return
    backlog = costs.backlog[costs.node_of]
    expected = node_finish(backlog, costs.work, costs.latency, costs.network)
    np.testing.assert_array_equal(alone(costs), expected)
    assert (own_finish(backlog, costs.latency, costs.network) <= expected).all()


@settings(deadline=None)
@given(problems(max_requests=8), st.randoms())
def test_paper_s_fitness_has_the_completion_of_the_evaluator(
    problem: RoutingProblem, random: Any
) -> None:
    costs, whole, x = drawn(problem, random)
    if not x.size:
        return
    separable = costs.cost[np.arange(x.size), x].sum()
    latest = evaluate_one(problem, whole).completion_seconds
    expected = costs.constant + separable + costs.time_weight * latest
    assert fitness(costs, x) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=30)
@given(problems(max_requests=3, max_nodes=3))
def test_makespan_of_the_exact_programme_is_the_formula_s(problem: RoutingProblem) -> None:
    """With time alone to weigh, the programme's dual bound is the least makespan there is."""
    costs, _, rows, _ = scalarise(problem)
    if not rows.size:
        return
    time_only = costs._replace(
        cost=np.where(np.isfinite(costs.cost), 0.0, np.inf), time_weight=1.0, constant=0.0
    )
    chosen, dual, _ = solve_programme(time_only, 1e9, 20.0)
    every = node_completion_seconds(problem, every_assignment(problem)).max(axis=1)
    assert chosen is not None
    whole = np.full(problem.n_requests, -1, dtype=np.int64)
    whole[rows] = chosen
    reached = node_completion_seconds(problem, whole[None, :]).max()
    assert reached == pytest.approx(every.min(), rel=1e-6, abs=1e-6)
    assert dual == pytest.approx(every.min(), rel=1e-6, abs=1e-6)


def _adds_a_maximum_and_a_backlog(node: ast.AST) -> bool:
    """Whether an expression adds up a backlog and a maximum, as the formula does."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        return False
    parts, terms = [node.left, node.right], []
    while parts:
        part = parts.pop()
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
            parts += [part.left, part.right]
        else:
            terms.append(ast.unparse(part))
    has_maximum = any(term.startswith(("max(", "np.maximum(")) for term in terms)
    return has_maximum and any("backlog" in term for term in terms)


def test_formula_is_written_in_one_place() -> None:
    written = [
        path.relative_to(SOURCES).as_posix()
        for path in sorted(SOURCES.rglob("*.py"))
        if "backlog" in (text := path.read_text()) and "max" in text
        for node in ast.walk(ast.parse(text))
        if _adds_a_maximum_and_a_backlog(node)
    ]
    assert sorted(set(written)) == ["routing/completion.py"]
