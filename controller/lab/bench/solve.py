"""One policy on one problem, with the whole account of what it found."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from controller.routing.evaluator import evaluate_one
from controller.routing.objective import bounds_of, objectives
from controller.routing.policies import policy_named, warm_up
from controller.routing.policy import Budget
from controller.routing.problem import RoutingProblem


@dataclass(frozen=True, slots=True)
class SolveReport:
    """What `edge-controller lab solve --json` prints; `docs/problem-format.md` has each field."""

    policy: str
    assignment: list[int]
    quality_loss: float
    cost_usd: float
    energy_joules: float
    completion_seconds: float
    objective: float
    lower_bound: float | None
    bounds: list[list[float]]
    evaluations: int
    decision_milliseconds: float
    seed: int

    def as_json(self) -> dict[str, Any]:
        """Plain values, in the order of the page."""
        return asdict(self)


def solve(
    problem: RoutingProblem,
    policy_name: str,
    budget_seconds: float | None = None,
    seed: int = 0,
    max_evaluations: int | None = None,
) -> SolveReport:
    """Decide once, after a warm-up that is not counted.

    Args:
        problem: the arrays.
        policy_name: as in `policy_names()`.
        budget_seconds: how long the policy may think; None takes the contract's default, and for
            `exact` its own.
        seed: of the policy's random numbers.
        max_evaluations: with it and no `budget_seconds`, the answer is the same everywhere.

    Raises:
        UnknownPolicy: no policy has the name.
        MissingMetadata: the problem lacks an array that the policy needs.
        SolverMissing: `exact` without SciPy.
        ValueError: a budget below 0.
    """
    if budget_seconds is not None and not budget_seconds >= 0.0:
        raise ValueError(f"the budget must be at least 0 s, not {budget_seconds}")
    if max_evaluations is not None and max_evaluations < 0:
        raise ValueError(f"the evaluation budget must be at least 0, not {max_evaluations}")
    policy = policy_named(policy_name)
    # The objective is compiled as well, and a first call of either would be timed as a search.
    warm_up(("memetic",) if policy_name == "exact" else (policy_name,))
    bounds = bounds_of(problem)
    if budget_seconds is None and max_evaluations is None and policy_name != "exact":
        budget = Budget()
    else:
        budget = Budget(budget_seconds, max_evaluations)
    started = time.perf_counter()
    decision = policy.decide(problem, np.random.default_rng(seed), budget)
    elapsed = time.perf_counter() - started
    terms = evaluate_one(problem, decision.assignment)
    row = np.array(
        [[terms.quality_loss, terms.cost_usd, terms.energy_joules, terms.completion_seconds]]
    )
    return SolveReport(
        policy=policy_name,
        assignment=[int(destination) for destination in decision.assignment],
        quality_loss=terms.quality_loss,
        cost_usd=terms.cost_usd,
        energy_joules=terms.energy_joules,
        completion_seconds=terms.completion_seconds,
        objective=float(objectives(problem, row, bounds)[0]),
        lower_bound=decision.lower_bound,
        bounds=bounds.tolist(),
        evaluations=decision.evaluations,
        decision_milliseconds=1e3 * elapsed,
        seed=seed,
    )
