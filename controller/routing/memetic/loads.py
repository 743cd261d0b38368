"""What an assignment puts on the nodes, kept up to date move by move.

Taking a request off a node, or putting one on, changes its completion time in constant time: the
sum of work is a sum, and of the longest latency and the slowest link the two greatest are kept.
Committing a move costs as much as the node that is left has requests, because its sum is formed
anew: after millions of moves nothing has drifted.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from controller.routing.compiled import compiled, compiled_part
from controller.routing.node_loads import Costs, finish_joined, node_finish
from controller.routing.problem import FloatArray, IntArray

END: Final[Any] = np.int64(-1)
"""No request: the end of a node's list. Of a NumPy type, because a plain -1 is a type of its own to
Numba, and everything that takes a request would be compiled once more for it."""


class Loads(NamedTuple):
    """An assignment and the state of its nodes.

    Attributes:
        x: int64[R]; destination of each request.
        work: float64[N]; sum of work.
        latency: float64[N, 2]; the two greatest latencies; 0 where there are fewer.
        network: float64[N, 2]; the two greatest transfer times.
        queued: int64[N]; how many requests.
        first: int64[N]; the node's first request, or END.
        after: int64[R]; the next request on the same node, or END.
        before: int64[R]; the previous one, or END.
    """

    x: IntArray
    work: FloatArray
    latency: FloatArray
    network: FloatArray
    queued: IntArray
    first: IntArray
    after: IntArray
    before: IntArray


@compiled
def empty_loads(n_requests: int, n_nodes: int) -> Loads:
    """Loads of no assignment yet; `load_assignment` fills them."""
    return Loads(
        np.zeros(n_requests, dtype=np.int64),
        np.zeros(n_nodes),
        np.zeros((n_nodes, 2)),
        np.zeros((n_nodes, 2)),
        np.zeros(n_nodes, dtype=np.int64),
        np.full(n_nodes, END, dtype=np.int64),
        np.full(n_requests, END, dtype=np.int64),
        np.full(n_requests, END, dtype=np.int64),
    )


@compiled
def load_assignment(costs: Costs, loads: Loads, x: IntArray) -> None:
    """Make `loads` those of `x`, int64[R]."""
    loads.work[:] = 0.0
    loads.latency[:] = 0.0
    loads.network[:] = 0.0
    loads.queued[:] = 0
    loads.first[:] = END
    for r in range(x.size):
        put(costs, loads, r, x[r])


@compiled_part
def _raise_greatest(pair: FloatArray, value: float) -> None:
    if value > pair[0]:
        pair[1] = pair[0]
        pair[0] = value
    elif value > pair[1]:
        pair[1] = value


@compiled_part
def put(costs: Costs, loads: Loads, r: int, d: int) -> None:
    """Send request r, which is nowhere now, to destination d."""
    n = costs.node_of[d]
    loads.x[r] = d
    head = loads.first[n]
    loads.after[r] = head
    loads.before[r] = END
    if head != END:
        loads.before[head] = r
    loads.first[n] = r
    loads.queued[n] += 1
    loads.work[n] += costs.work[r, d]
    _raise_greatest(loads.latency[n], costs.latency[r, d])
    _raise_greatest(loads.network[n], costs.network[r, d])


@compiled_part
def take(costs: Costs, loads: Loads, r: int) -> None:
    """Take request r off its node; its entry of `x` stays until it is put elsewhere."""
    n = costs.node_of[loads.x[r]]
    before = loads.before[r]
    after = loads.after[r]
    if before == END:
        loads.first[n] = after
    else:
        loads.after[before] = after
    if after != END:
        loads.before[after] = before
    loads.queued[n] -= 1
    loads.work[n] = 0.0
    loads.latency[n, 0] = loads.latency[n, 1] = 0.0
    loads.network[n, 0] = loads.network[n, 1] = 0.0
    member = loads.first[n]
    while member != END:
        d = loads.x[member]
        loads.work[n] += costs.work[member, d]
        _raise_greatest(loads.latency[n], costs.latency[member, d])
        _raise_greatest(loads.network[n], costs.network[member, d])
        member = loads.after[member]


@compiled
def move(costs: Costs, loads: Loads, r: int, d: int) -> None:
    """Send request r to destination d instead of where it is."""
    take(costs, loads, r)
    put(costs, loads, r, d)


@compiled
def finish(costs: Costs, loads: Loads, n: int) -> Any:
    """float64, seconds: when node n has answered its share; 0 when it has none."""
    if loads.queued[n] == 0:
        return 0.0
    return node_finish(costs.backlog[n], loads.work[n], loads.latency[n, 0], loads.network[n, 0])


@compiled_part
def finish_with(costs: Costs, loads: Loads, n: int, r: int, d: int) -> Any:
    """float64, seconds: the same with request r of another node added at destination d of n."""
    return finish_joined(costs, loads.work[n], loads.latency[n, 0], loads.network[n, 0], r, d)


@compiled_part
def _without(costs: Costs, loads: Loads, n: int, r: int) -> tuple[float, float, float]:
    """Work, greatest latency and greatest transfer of node n without its request r, seconds."""
    d = loads.x[r]
    longest = loads.latency[n, int(costs.latency[r, d] >= loads.latency[n, 0])]
    slowest = loads.network[n, int(costs.network[r, d] >= loads.network[n, 0])]
    return loads.work[n] - costs.work[r, d], longest, slowest


@compiled_part
def finish_without(costs: Costs, loads: Loads, n: int, r: int) -> Any:
    """float64, seconds: the same without its request r."""
    if loads.queued[n] <= 1:
        return 0.0
    work, longest, slowest = _without(costs, loads, n, r)
    return node_finish(costs.backlog[n], work, longest, slowest)


@compiled_part
def finish_exchanged(costs: Costs, loads: Loads, n: int, out: int, r: int, d: int) -> Any:
    """float64, seconds: the same with request r at destination d of n instead of request `out`.

    r may be `out`: then it changes its destination on the node.
    """
    work, longest, slowest = _without(costs, loads, n, out)
    return finish_joined(costs, work, longest, slowest, r, d)


@compiled
def makespan(costs: Costs, loads: Loads) -> Any:
    """float64, seconds: when the last node has answered its share."""
    latest = 0.0
    for n in range(loads.queued.size):
        latest = max(latest, finish(costs, loads, n))
    return latest


@compiled
def separable_cost(costs: Costs, x: IntArray) -> Any:
    """float64: the part of J that is a sum over requests, without the constant."""
    total = 0.0
    for r in range(x.size):
        total += costs.cost[r, x[r]]
    return total
