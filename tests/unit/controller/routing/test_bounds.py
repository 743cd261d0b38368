import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.routing.bounds import lower_bound
from controller.routing.memetic.algorithm import MemeticPolicy
from controller.routing.policy import Budget
from controller.routing.problem import RoutingProblem
from tests.unit.controller.routing.problems import (
    coarse_problem,
    least_objective,
    objective_of,
    problems,
    random_problem,
)


@settings(deadline=None, max_examples=120)
@given(
    problems(max_requests=5, max_nodes=3),
    st.sampled_from([0.0, 1e-6, 0.02, 0.5, 100.0]),
    st.sampled_from([0, 1, 30, 500, 3000]),
)
def test_bound_is_below_the_optimum_whatever_is_known_and_whenever_it_stops(
    problem: RoutingProblem, above: float, evaluations: int
) -> None:
    if not problem.routable.any():
        return
    optimum = least_objective(problem)
    bound = lower_bound(problem, optimum + above, Budget(None, evaluations))
    assert bound <= optimum + 1e-9


@pytest.mark.slow
def test_bound_is_below_the_optimum_of_thousands_of_small_problems() -> None:
    for seed in range(3000):
        rng = np.random.default_rng(seed)
        n_requests, n_nodes = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        if seed % 2:
            problem = coarse_problem(seed, n_requests, n_nodes, 1 + seed % 3)
        else:
            problem = random_problem(seed, n_requests, n_nodes, serial=seed % 4 == 0)
        if problem.routable.any():
            optimum = least_objective(problem)
            known = optimum + float(rng.choice([0.0, 0.01, 1.0]))
            assert lower_bound(problem, known, Budget(None, 1000)) <= optimum + 1e-9


@pytest.mark.parametrize(("serial", "gap"), [(True, 0.05), (False, 0.01)])
def test_bound_at_30_by_88_is_near_the_best_known(serial: bool, gap: float) -> None:
    policy = MemeticPolicy()
    for seed in range(3):
        problem = random_problem(seed, 30, 44, 2, serial=serial)
        decision = policy.decide(problem, np.random.default_rng(seed), Budget(None, 1_000_000))
        found = objective_of(problem, decision.assignment)
        assert decision.lower_bound is not None
        assert 0.0 <= found - decision.lower_bound <= gap * found


def test_more_time_never_loosens_the_bound() -> None:
    problem = random_problem(2, 20, 6, serial=True)
    found = MemeticPolicy().decide(problem, np.random.default_rng(0), Budget(None, 50_000))
    known = objective_of(problem, found.assignment)
    bounds = [lower_bound(problem, known, Budget(None, n)) for n in (10, 200, 1000, 5000)]
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0]
