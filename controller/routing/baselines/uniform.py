"""Every request anywhere it may go."""

from dataclasses import dataclass

import numpy as np

from controller.routing.baselines.one_by_one import send_each
from controller.routing.policy import Budget, Decision
from controller.routing.problem import RoutingProblem


@dataclass(frozen=True, slots=True)
class RandomPolicy:
    """A feasible destination drawn uniformly for each request (DRLM's Random)."""

    name: str = "random"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign in one pass; the budget is never needed."""
        return send_each(problem, lambda r, feasible, backlog: int(rng.choice(feasible)))
