"""When nodes and requests finish under an assignment.

`node_completion_seconds` is the continuous-batching bound that the objective uses;
`finish_seconds` simulates the executors and gives each request its own time.
"""

import heapq
import math
from collections import deque

import numpy as np

from controller.routing.policy import UNASSIGNED
from controller.routing.problem import FloatArray, IntArray, RoutingProblem


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
    """When each node has answered its share: the continuous-batching bound.

    C_n = B_n + max(sum of work, max of latency) + max of network over the requests sent to n:
    the sum is what a saturated engine needs, the max what the longest sequence needs however
    empty the engine is. With one slot work equals latency and C_n is exactly FIFO (ours).

    Args:
        problem: the arrays.
        assignments: int64[P, R]; destination index, or -1 for a request sent nowhere.

    Returns:
        float64[P, N], seconds after the window closed; 0 for a node that received nothing.

    Raises:
        ValueError: an assignment names no destination.

    Source: routing specification, section 2.
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
    completion = np.where(used, backlog + np.maximum(work, longest) + slowest_link, 0.0)
    return completion.reshape(population, problem.n_nodes)


def finish_seconds(problem: RoutingProblem, assignment: IntArray) -> FloatArray:
    """When each request's answer is complete, by simulating every node's executor.

    A node starts with its backlog done. Each of its destinations then admits its requests in batch
    order, as many at once as it has slots. A running sequence takes the share work / latency of the
    executor when it runs at full speed; while the shares of a node add up to more than 1 all slow
    down alike, so the executor does one second of work a second. Transfer is added at the end.
    Where the problem names no slots, a destination has as many as saturate its engine: latency /
    work of the request, rounded up.

    Args:
        problem: the arrays.
        assignment: int64[R]; destination index, or -1 for a request sent nowhere.

    Returns:
        float64[R], seconds after the window closed; NaN for a request sent nowhere.

    Raises:
        ValueError: the assignment names no destination.
    """
    chosen = checked_assignments(problem, np.asarray(assignment)[None, :])[0]
    finish = np.full(problem.n_requests, np.nan)
    queues: dict[int, list[int]] = {}
    for r in np.flatnonzero(chosen != UNASSIGNED).tolist():
        queues.setdefault(int(problem.node_of[chosen[r]]), []).append(r)
    for node, queue in queues.items():
        _simulate_node(problem, chosen, queue, float(problem.backlog_seconds[node]), finish)
    return finish


def _simulate_node(
    problem: RoutingProblem,
    chosen: IntArray,
    queue: list[int],
    start_seconds: float,
    finish: FloatArray,
) -> None:
    """Fill `finish` for one node.

    All running sequences slow down by one factor, so each ends when the common clock of
    full-speed seconds reaches its admission time plus its full-speed length.
    """
    waiting: dict[int, deque[int]] = {}
    for r in queue:
        waiting.setdefault(int(chosen[r]), deque()).append(r)
    busy_slots = dict.fromkeys(waiting, 0)
    running: list[tuple[float, int, float]] = []  # (end on the full-speed clock, request, share)
    now, clock = start_seconds, 0.0

    def admit(destination: int) -> None:
        line = waiting[destination]
        while line:
            latency = float(problem.latency_seconds[line[0], destination])
            work = float(problem.work_seconds[line[0], destination])
            if busy_slots[destination] >= _slots(problem, destination, latency, work):
                return
            length = max(latency, work)
            share = work / length if length > 0.0 else 0.0
            heapq.heappush(running, (clock + length, line.popleft(), share))
            busy_slots[destination] += 1

    for destination in waiting:
        admit(destination)
    while running:
        demand = sum(share for _, _, share in running)
        end, r, _ = heapq.heappop(running)
        now += (end - clock) * max(1.0, demand)
        clock = end
        destination = int(chosen[r])
        finish[r] = now + float(problem.network_seconds[r, destination])
        busy_slots[destination] -= 1
        admit(destination)


def _slots(problem: RoutingProblem, destination: int, latency: float, work: float) -> int:
    if problem.metadata.slots is not None:
        return int(problem.metadata.slots[destination])
    if work <= 0.0:
        return problem.n_requests
    return max(1, math.ceil(latency / work - 1e-9))
