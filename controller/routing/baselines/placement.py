"""Only the edge, or only the cloud."""

from dataclasses import dataclass

import numpy as np

from controller.routing.baselines.one_by_one import least_loaded, send_each
from controller.routing.policy import Budget, Decision
from controller.routing.problem import FloatArray, IntArray, MissingMetadata, RoutingProblem


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """The least loaded destination on one kind of node (CEMA V-B, "then choose within the set").

    A request that no node of that kind can take goes to the least loaded of the others: a policy
    refuses nothing that is feasible.

    Attributes:
        edge: whether edge nodes are the ones wanted.
    """

    name: str
    edge: bool

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign in one pass; the budget is never needed.

        Raises:
            MissingMetadata: the problem does not say which nodes are on the edge.
        """
        node_is_edge = problem.metadata.node_is_edge
        if node_is_edge is None:
            raise MissingMetadata(self.name, "node_is_edge")
        wanted = (node_is_edge == self.edge)[problem.node_of]

        def choose(r: int, feasible: IntArray, backlog: FloatArray) -> int:
            inside = feasible[wanted[feasible]]
            return least_loaded(problem, r, inside if inside.size else feasible, backlog)

        return send_each(problem, choose)


def edge_only() -> PlacementPolicy:
    """The policy `edge-only`."""
    return PlacementPolicy("edge-only", edge=True)


def cloud_only() -> PlacementPolicy:
    """The policy `cloud-only`."""
    return PlacementPolicy("cloud-only", edge=False)
