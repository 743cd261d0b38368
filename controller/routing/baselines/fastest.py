"""Every request where it would be answered soonest if nothing waited there."""

from dataclasses import dataclass

import numpy as np

from controller.routing.baselines.one_by_one import first_least, send_each
from controller.routing.policy import Budget, Decision
from controller.routing.problem import RoutingProblem


@dataclass(frozen=True, slots=True)
class FastestPolicy:
    """argmin of the predicted inference time; queues and transfer are ignored (DRLM's Fastest)."""

    name: str = "fastest"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign in one pass; the budget is never needed."""
        latency = problem.latency_seconds
        return send_each(
            problem, lambda r, feasible, backlog: first_least(feasible, latency[r, feasible])
        )
