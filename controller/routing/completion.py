"""When a node has answered its share of a batch: the one formula, and all assignments at once.

    C_n = B_n + max(sum of work, max of latency) + max of network

over the requests that are sent to node n: its backlog B_n first; then the sum, which is what a
saturated engine needs, or the max, which is what the longest sequence needs however empty the
engine is; then the slowest transfer. With one slot work equals latency and C_n is exactly FIFO
(ours). T, the makespan, is the greatest C_n of the nodes that got anything.

`controller.routing.node_loads` compiles `node_finish` for the searches. `controller.routing.exact`
has it as constraints.
"""

from typing import Any

import numpy as np

from controller.routing.policy import UNASSIGNED
from controller.routing.problem import FloatArray, IntArray, RoutingProblem


def node_finish(backlog: Any, work: Any, latency: Any, network: Any) -> Any:
    """When a node that got something has answered it, seconds after the window closed.

    Numbers, or arrays that broadcast.

    Args:
        backlog: seconds of work ahead of the batch.
        work: seconds, the sum over its requests.
        latency: seconds, the greatest of its requests.
        network: seconds, the greatest of its requests.
    """
    return backlog + np.maximum(work, latency) + network


def own_finish(waiting: Any, latency: Any, network: Any) -> Any:
    """When one request is answered that begins after `waiting` seconds, whatever runs beside it.

    Never later than the `node_finish` of its node. Numbers, or arrays that broadcast.
    """
    return waiting + latency + network


def checked_assignments(problem: RoutingProblem, assignments: IntArray) -> IntArray:
    """`assignments` as int64[P, R], each entry a destination index or `UNASSIGNED`.

    Raises:
        ValueError: another shape, dtype or index.
    """
    array = np.asarray(assignments)
    if array.dtype.kind not in "iu":
        raise ValueError(f"assignments must be integers, not {array.dtype}")
    if array.ndim != 2 or array.shape[1] != problem.n_requests:
        raise ValueError(f"assignments has shape {array.shape}; expected [P, {problem.n_requests}]")
    if array.size and (array.min() < UNASSIGNED or array.max() >= problem.n_destinations):
        raise ValueError(f"assignment outside [-1, {problem.n_destinations})")
    return array.astype(np.int64, copy=False)


def node_completion_seconds(problem: RoutingProblem, assignments: IntArray) -> FloatArray:
    """When each node has answered its share, of many assignments.

    Args:
        problem: the arrays.
        assignments: int64[P, R]; destination index, or -1 for a request sent nowhere.

    Returns:
        float64[P, N], seconds after the window closed; 0 for a node that received nothing.

    Raises:
        ValueError: an assignment names no destination.
    """
    chosen = checked_assignments(problem, assignments)
    population, n_requests = chosen.shape
    sent = chosen != UNASSIGNED
    rows = np.arange(n_requests)
    nodes = problem.node_of[chosen]  # [P, R]; -1 reads the last destination and is masked below
    cells = np.arange(population)[:, None] * problem.n_nodes + nodes
    cells = cells[sent]

    def pick(values: FloatArray) -> FloatArray:
        return np.asarray(values[rows, chosen][sent])

    size = population * problem.n_nodes
    work = np.bincount(cells, weights=pick(problem.work_seconds), minlength=size)
    longest, slowest_link = np.zeros(size), np.zeros(size)
    np.maximum.at(longest, cells, pick(problem.latency_seconds))
    np.maximum.at(slowest_link, cells, pick(problem.network_seconds))
    used = np.bincount(cells, minlength=size) > 0
    backlog = np.tile(problem.backlog_seconds, population)
    completion = np.where(used, node_finish(backlog, work, longest, slowest_link), 0.0)
    return completion.reshape(population, problem.n_nodes)
