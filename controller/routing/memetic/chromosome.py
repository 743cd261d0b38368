"""Chromosomes: one destination index for each request that can go somewhere."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.routing.compiled import compiled_part, random_index, stable_order
from controller.routing.objective import Costs
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
def legal_destinations(costs: Costs) -> tuple[IntArray, IntArray]:
    """Each request's feasible destinations in order of index, and how many there are.

    Returns:
        int64[R, D], of which the first counts[r] of row r count, and int64[R].
    """
    n_requests, n_destinations = costs.cost.shape
    legal = np.zeros((n_requests, n_destinations), dtype=np.int64)
    counts = np.zeros(n_requests, dtype=np.int64)
    for r in range(n_requests):
        for d in range(n_destinations):
            if costs.cost[r, d] < np.inf:
                legal[r, counts[r]] = d
                counts[r] += 1
    return legal, counts


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
            finish = queue[costs.node_of[d]] + costs.latency[r, d] + costs.network[r, d]
            if finish < soonest:
                soonest = finish
                x[r] = d
        queue[costs.node_of[x[r]]] += costs.work[r, x[r]]


@compiled_part
def random_legal(legal: IntArray, counts: IntArray, state: NDArray[np.uint64], x: IntArray) -> None:
    """Fill `x` with uniformly drawn feasible destinations."""
    for r in range(x.size):
        x[r] = legal[r, random_index(state, counts[r])]


@compiled_part
def fitness(costs: Costs, x: IntArray, finish: FloatArray, nodes: FloatArray) -> Any:
    """float64: J of a whole assignment.

    Args:
        costs: the weighed problem.
        x: int64[R].
        finish: float64[N]; filled with each node's completion, 0 where nothing was sent.
        nodes: float64[3, N]; scratch.
    """
    nodes[:] = 0.0
    finish[:] = 0.0
    total = costs.constant
    for r in range(x.size):
        d = x[r]
        n = costs.node_of[d]
        total += costs.cost[r, d]
        nodes[0, n] += costs.work[r, d]
        nodes[1, n] = max(nodes[1, n], costs.latency[r, d])
        nodes[2, n] = max(nodes[2, n], costs.network[r, d])
        finish[n] = costs.backlog[n] + max(nodes[0, n], nodes[1, n]) + nodes[2, n]
    latest = 0.0
    for n in range(finish.size):
        latest = max(latest, finish[n])
    return total + costs.time_weight * latest
