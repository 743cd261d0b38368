"""Requests one by one to the node with the least work outstanding."""

from dataclasses import dataclass

import numpy as np

from controller.routing.policy import UNASSIGNED, Budget, Decision
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
        del rng
        assignment = np.full(problem.n_requests, UNASSIGNED, dtype=np.int64)
        backlog = problem.backlog_seconds.copy()
        for r in range(problem.n_requests):
            feasible = np.flatnonzero(problem.feasible[r])
            if not feasible.size:
                continue
            waiting = backlog[problem.node_of[feasible]]
            work = problem.work_seconds[r, feasible]
            chosen = int(feasible[np.lexsort((feasible, work, waiting))[0]])
            assignment[r] = chosen
            backlog[problem.node_of[chosen]] += problem.work_seconds[r, chosen]
        return Decision(assignment, evaluations=int(problem.feasible.sum()))
