"""Requests one by one to the node with the least work outstanding."""

from dataclasses import dataclass

import numpy as np

from controller.routing.baselines.one_by_one import least_loaded, send_each
from controller.routing.policy import Budget, Decision
from controller.routing.problem import RoutingProblem


@dataclass(frozen=True, slots=True)
class LeastLoadedPolicy:
    """The feasible destination whose node has the smallest backlog, counting this batch's work.

    Among destinations of equally loaded nodes, the one where the request takes the least work,
    then the first. It looks at neither quality, money nor energy (CEMA V-B). The shell falls back
    to it when a policy fails.
    """

    name: str = "least-loaded"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign in one pass; the budget is never needed."""
        return send_each(
            problem, lambda r, feasible, backlog: least_loaded(problem, r, feasible, backlog)
        )
