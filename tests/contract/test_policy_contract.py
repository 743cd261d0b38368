"""What every routing policy keeps, whoever wrote it."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.routing.policies import policy_named, policy_names
from controller.routing.policy import UNASSIGNED, Budget, RoutingPolicy
from controller.routing.problem import RoutingProblem
from tests.unit.controller.routing.problems import least_objective, objective_of, problems

BUDGET = Budget(seconds=None, max_evaluations=300)


@pytest.fixture(scope="module", params=policy_names())
def policy(request: pytest.FixtureRequest) -> RoutingPolicy:
    name: str = request.param
    return policy_named(name)


relaxed = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@relaxed
@given(problem=problems(), seed=st.integers(0, 2**32 - 1))
def test_assignment_is_feasible_and_refuses_exactly_the_requests_that_none_can_take(
    policy: RoutingPolicy, problem: RoutingProblem, seed: int
) -> None:
    decision = policy.decide(problem, np.random.default_rng(seed), BUDGET)
    assert decision.assignment.dtype == np.int64
    assert decision.assignment.shape == (problem.n_requests,)
    assert ((decision.assignment == UNASSIGNED) == ~problem.routable).all()
    sent = np.flatnonzero(problem.routable)
    assert problem.feasible[sent, decision.assignment[sent]].all()


@relaxed
@given(problem=problems(), seed=st.integers(0, 2**32 - 1))
def test_same_problem_seed_and_evaluation_budget_give_the_same_answer(
    policy: RoutingPolicy, problem: RoutingProblem, seed: int
) -> None:
    first = policy.decide(problem, np.random.default_rng(seed), BUDGET)
    again = policy.decide(problem, np.random.default_rng(seed), BUDGET)
    assert first.assignment.tolist() == again.assignment.tolist()
    assert first.evaluations == again.evaluations
    assert first.lower_bound == again.lower_bound


@relaxed
@given(problem=problems(max_requests=4, max_nodes=3))
def test_lower_bound_is_never_above_the_optimum(
    policy: RoutingPolicy, problem: RoutingProblem
) -> None:
    decision = policy.decide(problem, np.random.default_rng(0), BUDGET)
    optimum = least_objective(problem)
    assert objective_of(problem, decision.assignment) >= optimum - 1e-9
    if decision.lower_bound is not None:
        assert decision.lower_bound <= optimum + 1e-9


@relaxed
@given(problem=problems())
def test_problem_is_not_changed(policy: RoutingPolicy, problem: RoutingProblem) -> None:
    before = {
        part.name: np.copy(getattr(problem, part.name))
        for part in fields(RoutingProblem)
        if isinstance(getattr(problem, part.name), np.ndarray)
    }
    policy.decide(problem, np.random.default_rng(0), BUDGET)
    for name, values in before.items():
        np.testing.assert_array_equal(getattr(problem, name), values)


@relaxed
@given(problem=problems())
def test_batch_that_nothing_can_take_is_refused_whole(
    policy: RoutingPolicy, problem: RoutingProblem
) -> None:
    closed = replace(problem, feasible=np.zeros_like(problem.feasible))
    decision = policy.decide(closed, np.random.default_rng(0), BUDGET)
    assert (decision.assignment == UNASSIGNED).all()
