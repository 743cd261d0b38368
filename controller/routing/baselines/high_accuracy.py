"""Every request to the model that is best at its class."""

from dataclasses import dataclass

import numpy as np

from controller.routing.baselines.one_by_one import class_quality, first_least, send_each
from controller.routing.policy import Budget, Decision
from controller.routing.problem import RoutingProblem


@dataclass(frozen=True, slots=True)
class HighAccuracyPolicy:
    """argmax of the class's accuracy, else of the predicted quality; the first such destination.

    It ignores queues, so it crowds one destination: that is what it is compared for (DRLM).
    """

    name: str = "high-accuracy"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign in one pass; the budget is never needed."""
        quality = class_quality(problem)
        return send_each(
            problem, lambda r, feasible, backlog: first_least(feasible, -quality[r, feasible])
        )
