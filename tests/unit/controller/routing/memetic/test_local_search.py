from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.routing.compiled import limits_until
from controller.routing.memetic.loads import (
    empty_loads,
    load_assignment,
    makespan,
    separable_cost,
)
from controller.routing.memetic.local_search import improve, new_search, shed
from controller.routing.objective import scalarise
from controller.routing.problem import RoutingProblem
from tests.unit.controller.routing.problems import problems, random_problem


@settings(deadline=None)
@given(problems(max_requests=8), st.randoms(), st.floats(0.3, 1.5))
def test_local_search_keeps_the_cap_and_never_raises_the_cost(
    problem: RoutingProblem, random: Any, tightness: float
) -> None:
    costs, _, rows, seeds = scalarise(problem)
    if not rows.size:
        return
    loads = empty_loads(rows.size, problem.n_nodes)
    load_assignment(costs, loads, seeds[random.randrange(4)])
    cap = makespan(costs, loads) * tightness
    around = new_search(costs)
    if not shed(costs, loads, around, cap, limits_until(None, None)):
        return
    assert makespan(costs, loads) <= cap * (1.0 + 2e-9)
    before = separable_cost(costs, loads.x)
    improve(costs, loads, around, cap, limits_until(None, None), True)
    after = separable_cost(costs, loads.x)
    assert after <= before + 1e-12
    assert makespan(costs, loads) <= cap * (1.0 + 2e-9)
    assert problem.feasible[rows, loads.x].all()

    improve(costs, loads, around, cap, limits_until(None, None), True)
    assert separable_cost(costs, loads.x) == after


def test_local_optimum_has_no_shift_and_no_swap_that_pays() -> None:
    """Checked by trying them all, on problems large enough to have many."""
    for seed in range(5):
        problem = random_problem(seed, 14, 5, serial=True)
        costs, _, rows, seeds = scalarise(problem)
        loads = empty_loads(rows.size, problem.n_nodes)
        load_assignment(costs, loads, seeds[3])
        cap = makespan(costs, loads) * 1.1
        improve(costs, loads, new_search(costs), cap, limits_until(None, None), True)
        found = separable_cost(costs, loads.x)
        x = loads.x.copy()
        for i in range(rows.size):
            for d in range(problem.n_destinations):
                other = x.copy()
                other[i] = d
                assert_no_better(costs, loads, other, cap, found)
            for j in range(i):
                other = x.copy()
                other[i], other[j] = x[j], x[i]
                assert_no_better(costs, loads, other, cap, found)


def assert_no_better(costs: Any, loads: Any, x: Any, cap: float, found: float) -> None:
    load_assignment(costs, loads, np.asarray(x))
    fits = makespan(costs, loads) <= cap * (1.0 - 1e-9)
    assert not (fits and separable_cost(costs, loads.x) < found - 1e-9)


def test_cap_that_nothing_can_keep_is_reported() -> None:
    problem = random_problem(1, 6, 2)
    costs, _, rows, seeds = scalarise(problem)
    loads = empty_loads(rows.size, problem.n_nodes)
    load_assignment(costs, loads, seeds[0])
    assert not shed(costs, loads, new_search(costs), 1e-6, limits_until(None, None))
