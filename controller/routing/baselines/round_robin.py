"""Requests in turn over the destinations that may take them."""

from dataclasses import dataclass

import numpy as np

from controller.routing.policy import UNASSIGNED, Budget, Decision
from controller.routing.problem import RoutingProblem


@dataclass(frozen=True, slots=True)
class RoundRobinPolicy:
    """The next destination in order for each request, skipping those not feasible for it.

    Where a batch starts is drawn from `rng`, so that small batches do not all begin at the first
    destination; within the batch the order is kept (CEMA V-B).
    """

    name: str = "round-robin"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign in one pass; the budget is never needed."""
        assignment = np.full(problem.n_requests, UNASSIGNED, dtype=np.int64)
        turn = int(rng.integers(problem.n_destinations))
        for r in range(problem.n_requests):
            feasible = np.flatnonzero(problem.feasible[r])
            if not feasible.size:
                continue
            following = feasible[feasible >= turn]
            chosen = int(following[0] if following.size else feasible[0])
            assignment[r] = chosen
            turn = (chosen + 1) % problem.n_destinations
        return Decision(assignment, evaluations=problem.n_requests)
