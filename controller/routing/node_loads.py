"""What a batch puts on nodes, one request after another, for compiled code."""

from typing import Any, NamedTuple

import numpy as np

from controller.routing import completion
from controller.routing.compiled import compiled_part
from controller.routing.problem import BoolArray, FloatArray, IntArray

node_finish = compiled_part(completion.node_finish)
own_finish = compiled_part(completion.own_finish)


class Costs(NamedTuple):
    """A problem with its terms weighed: J(x) = constant + sum of cost + time_weight * T.

    Only the requests that can go somewhere are in it.

    Attributes:
        cost: float64[R, D]; weighed and normalised separable part; infinite where not feasible.
        work: float64[R, D], seconds.
        latency: float64[R, D], seconds.
        network: float64[R, D], seconds.
        node_of: int64[D].
        backlog: float64[N], seconds.
        time_weight: per second of completion time.
        constant: J of a batch without cost and time.
    """

    cost: FloatArray
    work: FloatArray
    latency: FloatArray
    network: FloatArray
    node_of: IntArray
    backlog: FloatArray
    time_weight: float
    constant: float


class NodeLoads(NamedTuple):
    """What nodes have been given; `add` brings it up to date.

    Attributes:
        work: float64[N], seconds; sum.
        latency: float64[N], seconds; the greatest.
        network: float64[N], seconds; the greatest.
        is_used: bool[N].
    """

    work: FloatArray
    latency: FloatArray
    network: FloatArray
    is_used: BoolArray


@compiled_part
def no_loads(n_nodes: int) -> NodeLoads:
    """Loads of an empty batch."""
    return NodeLoads(
        np.zeros(n_nodes), np.zeros(n_nodes), np.zeros(n_nodes), np.zeros(n_nodes, dtype=np.bool_)
    )


@compiled_part
def clear(loads: NodeLoads) -> None:
    """Take everything off the nodes."""
    loads.work[:] = 0.0
    loads.latency[:] = 0.0
    loads.network[:] = 0.0
    loads.is_used[:] = False


@compiled_part
def add(costs: Costs, loads: NodeLoads, r: int, d: int) -> None:
    """Put request r on destination d."""
    n = costs.node_of[d]
    loads.is_used[n] = True
    loads.work[n] += costs.work[r, d]
    loads.latency[n] = max(loads.latency[n], costs.latency[r, d])
    loads.network[n] = max(loads.network[n], costs.network[r, d])


@compiled_part
def finish_of(costs: Costs, loads: NodeLoads, n: int) -> Any:
    """float64, seconds: when node n has answered its share; 0 when it has none."""
    if not loads.is_used[n]:
        return 0.0
    return node_finish(costs.backlog[n], loads.work[n], loads.latency[n], loads.network[n])


@compiled_part
def finish_joined(costs: Costs, work: float, latency: float, network: float, r: int, d: int) -> Any:
    """float64, seconds: when d's node has answered a share with request r at d added to it.

    Args:
        costs: the weighed problem.
        work: seconds, the sum over the share without r.
        latency: seconds, the greatest of it.
        network: seconds, the greatest of it.
        r: index of a request.
        d: index of a destination.
    """
    return node_finish(
        costs.backlog[costs.node_of[d]],
        work + costs.work[r, d],
        max(latency, costs.latency[r, d]),
        max(network, costs.network[r, d]),
    )


@compiled_part
def alone_seconds(costs: Costs, r: int, d: int) -> Any:
    """float64: when request r would finish at d if it were the whole batch."""
    return finish_joined(costs, 0.0, 0.0, 0.0, r, d)


@compiled_part
def last_finish(costs: Costs, loads: NodeLoads) -> Any:
    """float64, seconds: when the last node has answered its share."""
    latest = 0.0
    for n in range(loads.work.size):
        latest = max(latest, finish_of(costs, loads, n))
    return latest
