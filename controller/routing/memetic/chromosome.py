"""Chromosomes: one destination index for each request that can go somewhere."""

from typing import Any

import numpy as np

from controller.routing.compiled import compiled_part, stable_order
from controller.routing.node_loads import Costs, NodeLoads, add, clear, last_finish, own_finish
from controller.routing.problem import FloatArray, IntArray, RoutingProblem


def predicted_lengths(problem: RoutingProblem, rows: IntArray) -> FloatArray:
    """How long each of the requests `rows` is: tokens when predicted, else its mean latency.

    For ordering only; float64[rows].
    """
    if problem.metadata.predicted_tokens is not None:
        return np.asarray(problem.metadata.predicted_tokens[rows])
    allowed = problem.feasible[rows]
    total = np.where(allowed, problem.latency_seconds[rows], 0.0).sum(axis=1)
    return np.asarray(total / allowed.sum(axis=1))


@compiled_part
def load_aware(costs: Costs, length: FloatArray, x: IntArray) -> None:
    """Fill `x` with the earliest-finish assignment, longest requests first.

    A[d] = queue of d's node + inference + transfer; the queue then grows by the work.

    Source: CEMA Algorithm 2; one queue a node is ours.
    """
    queue = costs.backlog.copy()
    for r in stable_order(-length):
        soonest = np.inf
        for d in range(costs.cost.shape[1]):
            if costs.cost[r, d] == np.inf:
                continue
            waiting = queue[costs.node_of[d]]
            finish = own_finish(waiting, costs.latency[r, d], costs.network[r, d])
            if finish < soonest:
                soonest = finish
                x[r] = d
        queue[costs.node_of[x[r]]] += costs.work[r, x[r]]


@compiled_part
def fitness(costs: Costs, x: IntArray, loads: NodeLoads) -> Any:
    """float64: J of a whole assignment, int64[R]; `loads` becomes what it puts on the nodes."""
    clear(loads)
    total = costs.constant
    for r in range(x.size):
        total += costs.cost[r, x[r]]
        add(costs, loads, r, x[r])
    return total + costs.time_weight * last_finish(costs, loads)
