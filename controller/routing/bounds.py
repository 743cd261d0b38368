"""Lower bounds on J that go with a decision.

For a makespan T in an interval (a, b] every assignment costs at least time_weight * a, may use
only pairs that finish alone by b, and puts on a node no more work than fits by b. Relaxing that
capacity with prices per second of work on each node leaves a sum of minima over requests:

    L(prices) = constant + time_weight * a + sum over r of min over d of
                (cost[r, d] + price[n] * work[r, d]) - sum over n of price[n] * capacity[n],

a lower bound for every non-negative price vector. The least bound over intervals that cover all T
that could be better than the best known assignment bounds J itself. Intervals are halved where the
bound is least, and their prices raised by subgradient steps.

Source: routing specification, section 5; Held, Wolfe and Crowder, "Validation of subgradient
optimization", Mathematical Programming 6, 1974, for the step length.
"""

from typing import Any, Final

import numpy as np

from controller.routing.compiled import Limits, compiled, exhausted
from controller.routing.objective import Costs
from controller.routing.problem import FloatArray, IntArray

FIRST_INTERVALS: Final = 6
"""Intervals before halving starts."""

MAX_INTERVALS: Final = 400
"""Most intervals kept; a limit on memory that no test has reached under a serving budget."""

STEPS: Final = 25
"""Subgradient steps on one interval."""

PATIENCE: Final = 5
"""Steps without a better bound after which the step length is halved."""


@compiled
def alone_seconds(costs: Costs, r: int, d: int) -> Any:
    """float64: when request r would finish at d if it were the whole batch."""
    return (
        costs.backlog[costs.node_of[d]]
        + max(costs.work[r, d], costs.latency[r, d])
        + costs.network[r, d]
    )


@compiled
def candidate_pairs(
    costs: Costs, room: float, soonest: float
) -> tuple[IntArray, IntArray, FloatArray, FloatArray, FloatArray, FloatArray]:
    """The pairs that an assignment with J below the best known can contain.

    A pair is out when even with every other request at its cheapest, and the makespan at its
    least, J would be no better.

    Args:
        costs: the weighed problem.
        room: best known J, less the constant and every request's least cost.
        soonest: the least makespan, seconds.

    Returns:
        first[R + 1], where each request's pairs begin; node, cost, work, finish alone and
        network of each pair.
    """
    n_requests, n_destinations = costs.cost.shape
    first = np.zeros(n_requests + 1, dtype=np.int64)
    size = n_requests * n_destinations
    node = np.empty(size, dtype=np.int64)
    cost = np.empty(size)
    work = np.empty(size)
    alone = np.empty(size)
    network = np.empty(size)
    i = 0
    for r in range(n_requests):
        least = costs.cost[r].min()
        for d in range(n_destinations):
            if costs.cost[r, d] == np.inf:
                continue
            finish = alone_seconds(costs, r, d)
            if costs.cost[r, d] - least + costs.time_weight * max(soonest, finish) > room:
                continue
            node[i] = costs.node_of[d]
            cost[i] = costs.cost[r, d]
            work[i] = costs.work[r, d]
            alone[i] = finish
            network[i] = costs.network[r, d]
            i += 1
        first[r + 1] = i
    return first, node[:i], cost[:i], work[:i], alone[:i], network[:i]


@compiled
def _bound_interval(
    low: float,
    high: float,
    goal: float,
    constant: float,
    time_weight: float,
    backlog: FloatArray,
    first: IntArray,
    node: IntArray,
    cost: FloatArray,
    work: FloatArray,
    alone: FloatArray,
    network: FloatArray,
    prices: FloatArray,
    steps: int,
    limits: Limits,
) -> Any:
    """float64: a lower bound of J for makespans in (low, high]; `prices` become the best found.

    Infinite when some request fits nowhere by `high`.
    """
    n_nodes = backlog.size
    n_requests = first.size - 1
    # Only what fits by `high`, packed, is looked at again and again.
    least_network = np.full(n_nodes, np.inf)
    size = first[n_requests]
    begin = np.zeros(n_requests + 1, dtype=np.int64)
    at = np.empty(size, dtype=np.int64)
    price_free = np.empty(size)
    seconds = np.empty(size)
    k = 0
    for r in range(n_requests):
        for i in range(first[r], first[r + 1]):
            if alone[i] <= high:
                at[k] = node[i]
                price_free[k] = cost[i]
                seconds[k] = work[i]
                least_network[node[i]] = min(least_network[node[i]], network[i])
                k += 1
        begin[r + 1] = k
        if begin[r + 1] == begin[r]:
            return np.inf
    capacity = np.zeros(n_nodes)
    for n in range(n_nodes):
        if least_network[n] < np.inf:
            capacity[n] = max(0.0, high - backlog[n] - least_network[n])
    slope = np.empty(n_nodes)
    trial = prices.copy()
    best = -np.inf
    pace = 1.0
    without_gain = 0
    base = constant + time_weight * low
    for _ in range(steps):
        value = base
        for n in range(n_nodes):
            slope[n] = -capacity[n]
            value -= trial[n] * capacity[n]
        for r in range(n_requests):
            least = np.inf
            least_k = -1
            for j in range(begin[r], begin[r + 1]):
                priced = price_free[j] + trial[at[j]] * seconds[j]
                if priced < least:
                    least = priced
                    least_k = j
            value += least
            slope[at[least_k]] += seconds[least_k]
        limits.evaluations[0] += 1
        if value > best + 1e-12:
            best = value
            prices[:] = trial
            without_gain = 0
        else:
            without_gain += 1
            if without_gain >= PATIENCE:
                pace *= 0.5
                without_gain = 0
                trial[:] = prices
                continue
        if best >= goal or exhausted(limits):
            break
        norm = 0.0
        for n in range(n_nodes):
            if slope[n] < 0.0 and trial[n] == 0.0:
                slope[n] = 0.0  # the price cannot fall further
            norm += slope[n] * slope[n]
        if norm <= 0.0:
            break  # complementary: the bound of this interval is exact for the relaxation
        length = pace * (goal - value) / norm
        for n in range(n_nodes):
            trial[n] = max(0.0, trial[n] + length * slope[n])
    return best


@compiled
def lower_bound(costs: Costs, best_known: float, limits: Limits) -> Any:
    """float64: a value that no J is below; at most `best_known`.

    Valid whenever it stops: intervals not yet looked at carry the bound of the one that they
    were halved from.

    Args:
        costs: the weighed problem.
        best_known: J of some assignment.
        limits: when to stop.
    """
    n_requests = costs.cost.shape[0]
    n_nodes = costs.backlog.size
    cheapest = 0.0
    soonest = 0.0
    for r in range(n_requests):
        cheapest += costs.cost[r].min()
        least = np.inf
        for d in range(costs.cost.shape[1]):
            if costs.cost[r, d] < np.inf:
                least = min(least, alone_seconds(costs, r, d))
        soonest = max(soonest, least)
    simple = costs.constant + cheapest + costs.time_weight * soonest
    room = best_known - costs.constant - cheapest
    if simple >= best_known or costs.time_weight <= 0.0:
        return min(simple, best_known)
    latest = room / costs.time_weight  # a later makespan cannot be better
    # Rounding must not take away the pairs of the best known assignment itself.
    room += 1e-9 * max(1.0, abs(room))
    first, node, cost, work, alone, network = candidate_pairs(costs, room, soonest)
    for r in range(n_requests):
        if first[r + 1] == first[r]:
            return best_known

    low = np.empty(MAX_INTERVALS)
    high = np.empty(MAX_INTERVALS)
    bound = np.empty(MAX_INTERVALS)
    prices = np.zeros((MAX_INTERVALS, n_nodes))
    count = FIRST_INTERVALS
    ratio = (latest / soonest) ** (1.0 / count) if soonest > 0.0 else 0.0
    for i in range(count):
        if soonest > 0.0:
            low[i] = soonest * ratio**i
            high[i] = soonest * ratio ** (i + 1)
        else:
            low[i] = latest * i / count
            high[i] = latest * (i + 1) / count
        bound[i] = costs.constant + cheapest + costs.time_weight * low[i]
    low[0] = min(low[0], soonest)
    high[count - 1] = max(high[count - 1], latest)
    for i in range(count - 1, -1, -1):
        if i < count - 1:
            prices[i] = prices[i + 1]
        if exhausted(limits):
            continue
        found = _bound_interval(
            low[i], high[i], best_known, costs.constant, costs.time_weight, costs.backlog,
            first, node, cost, work, alone, network, prices[i], 2 * STEPS, limits,
        )  # fmt: skip
        bound[i] = max(bound[i], found)
    while True:
        weakest = 0
        for i in range(count):
            if bound[i] < bound[weakest]:
                weakest = i
        least = bound[weakest]
        if (
            least >= best_known
            or count + 1 > MAX_INTERVALS
            or high[weakest] - low[weakest] <= 1e-6 * high[weakest]
            or exhausted(limits)
        ):
            return min(least, best_known)
        middle = 0.5 * (low[weakest] + high[weakest])
        low[count] = middle
        high[count] = high[weakest]
        high[weakest] = middle
        bound[count] = least
        prices[count] = prices[weakest]
        for i in (weakest, count):
            found = _bound_interval(
                low[i], high[i], best_known, costs.constant, costs.time_weight, costs.backlog,
                first, node, cost, work, alone, network, prices[i], STEPS, limits,
            )  # fmt: skip
            bound[i] = max(bound[i], found)
        count += 1
