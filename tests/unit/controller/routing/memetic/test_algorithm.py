import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.routing.memetic.algorithm import MemeticPolicy
from controller.routing.objective import scalarise
from controller.routing.policies import SERVING_POLICIES, policy_named
from controller.routing.policy import Budget
from controller.routing.problem import Normalisation, RoutingProblem
from tests.unit.controller.routing.problems import (
    least_objective,
    objective_of,
    permuted,
    problems,
    random_problem,
)

POLICY = MemeticPolicy()
UNTIL_STALLED = Budget(seconds=None)


def solved(problem: RoutingProblem, seed: int = 0, budget: Budget = UNTIL_STALLED) -> float:
    decision = POLICY.decide(problem, np.random.default_rng(seed), budget)
    return objective_of(problem, decision.assignment)


@settings(deadline=None, max_examples=60)
@given(problems(max_requests=5, max_nodes=3))
def test_small_problems_are_solved_to_the_optimum_by_trying_everything(
    problem: RoutingProblem,
) -> None:
    assert solved(problem) == pytest.approx(least_objective(problem), abs=1e-9)


@settings(deadline=None, max_examples=30)
@given(problems(max_requests=5, max_nodes=3), st.randoms())
def test_permuting_requests_and_destinations_does_not_change_the_result(
    problem: RoutingProblem, random: Any
) -> None:
    """With given bounds: the random normalisation draws by position."""
    problem = replace(problem, bounds=np.array([[0.0, 5.0]] * 4))
    rows = np.array(random.sample(range(problem.n_requests), problem.n_requests))
    columns = np.array(random.sample(range(problem.n_destinations), problem.n_destinations))
    assert solved(permuted(problem, rows, columns)) == pytest.approx(solved(problem), abs=1e-9)


@settings(deadline=None, max_examples=30)
@given(problems(max_requests=5, max_nodes=3), st.integers(0, 2))
def test_more_backlog_never_helps(problem: RoutingProblem, node: int) -> None:
    fixed = replace(problem, bounds=np.array([[0.0, 5.0]] * 4))
    backlog = fixed.backlog_seconds.copy()
    backlog[node % problem.n_nodes] += 2.0
    assert solved(replace(fixed, backlog_seconds=backlog)) >= solved(fixed) - 1e-9


def test_identical_destinations_share_the_load() -> None:
    """Twelve equal requests, four equal serial nodes: three each."""
    ones = np.ones((12, 4))
    problem = RoutingProblem(
        quality=ones * 0.5, cost_usd=ones, energy_joules=ones, work_seconds=ones,
        latency_seconds=ones, network_seconds=ones * 0.1, node_of=np.arange(4),
        backlog_seconds=np.zeros(4), feasible=ones > 0, weights=np.full(4, 0.25),
    )  # fmt: skip
    decision = POLICY.decide(problem, np.random.default_rng(0), UNTIL_STALLED)
    assert np.bincount(decision.assignment, minlength=4).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("normalisation", Normalisation)
@pytest.mark.parametrize("serial", [True, False])
def test_result_is_never_worse_than_its_seeds_or_any_other_policy(
    normalisation: Normalisation, serial: bool
) -> None:
    for seed in range(3):
        problem = random_problem(seed, 30, 6, 2, serial=serial, normalisation=normalisation)
        ours = solved(problem, budget=Budget(seconds=None, max_evaluations=100_000))
        others = [
            policy_named(name).decide(problem, np.random.default_rng(seed), UNTIL_STALLED)
            for name in SERVING_POLICIES
            if name != "memetic"
        ]
        assert ours <= min(objective_of(problem, other.assignment) for other in others) + 1e-12
        assert ours <= min(objective_of(problem, x) for x in scalarise(problem).seeds)


def test_fixed_seed_and_evaluation_budget_give_the_same_answer_in_another_process() -> None:
    code = (
        "import numpy as np\n"
        "from controller.routing.policies import policy_named\n"
        "from controller.routing.policy import Budget\n"
        "from tests.unit.controller.routing.problems import random_problem\n"
        "p = random_problem(11, 40, 9, 2, serial=True)\n"
        "for name in ('memetic', 'cema'):\n"
        "    d = policy_named(name).decide(\n"
        "        p, np.random.default_rng(3), Budget(None, 20_000))\n"
        "    print(d.assignment.tolist(), d.lower_bound, d.evaluations)\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
        ).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert runs[0].count("\n") == 2


def test_seconds_end_the_search() -> None:
    """Not a measurement: a search of many seconds is cut to a fraction of one."""
    problem = random_problem(5, 128, 40, 2, serial=True)
    POLICY.decide(problem, np.random.default_rng(0), Budget(seconds=0.001))
    started = time.monotonic()
    POLICY.decide(problem, np.random.default_rng(0), Budget(seconds=0.05))
    assert time.monotonic() - started < 2.0


def test_budget_of_nothing_still_gives_a_legal_answer() -> None:
    problem = random_problem(5, 20, 4, infeasible_share=0.3)
    for budget in (Budget(seconds=0.0), Budget(seconds=None, max_evaluations=0)):
        decision = POLICY.decide(problem, np.random.default_rng(0), budget)
        sent = problem.routable
        assert problem.feasible[np.arange(20)[sent], decision.assignment[sent]].all()
