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

import time
from typing import Any, Final, NamedTuple

import numpy as np

from controller.routing.compiled import (
    Limits,
    compiled_part,
    compiled_without_gil,
    exhausted,
    limits_until,
)
from controller.routing.node_loads import Costs, alone_seconds
from controller.routing.objective import scalarise
from controller.routing.policy import Budget
from controller.routing.problem import BoolArray, FloatArray, IntArray, RoutingProblem

FIRST_INTERVALS: Final = 6
"""Intervals before halving starts."""

MAX_INTERVALS: Final = 400
"""Most intervals kept; a limit on memory that no test has reached under a serving budget."""

FIRST_STEPS: Final[Any] = np.int64(20)
"""Subgradient steps on each of the first intervals: soon, none is without a bound."""

STEPS: Final[Any] = np.int64(25)
"""Subgradient steps on one interval."""

ROUNDING: Final = 1e-11
"""Taken off a reported bound: J itself is only known to the rounding of its sums."""

PATIENCE: Final = 5
"""Steps without a better bound after which the step length is halved."""


class Pairs(NamedTuple):
    """Pairs of request and destination, request by request.

    Attributes:
        first: int64[R + 1]; where each request's pairs begin.
        destination: int64[K].
        node: int64[K].
        cost: float64[K].
        work: float64[K], seconds.
        alone: float64[K], seconds; finish if the request were the whole batch.
        network: float64[K], seconds.
    """

    first: IntArray
    destination: IntArray
    node: IntArray
    cost: FloatArray
    work: FloatArray
    alone: FloatArray
    network: FloatArray


class Intervals(NamedTuple):
    """Intervals of the makespan that together hold every assignment better than the best known.

    Attributes:
        low: float64[K], seconds.
        high: float64[K], seconds.
        bound: float64[K]; no assignment with its makespan in (low, high] has a smaller J.
        prices: float64[K, N]; of a second of work on each node.
        is_priced: bool[K]; whether the prices are the interval's own.
        held: int64[1]; how many there are.
    """

    low: FloatArray
    high: FloatArray
    bound: FloatArray
    prices: FloatArray
    is_priced: BoolArray
    held: IntArray


@compiled_part
def _least_parts(costs: Costs) -> tuple[float, float]:
    """The sum of every request's least cost, and the least makespan in seconds."""
    cheapest = 0.0
    soonest = 0.0
    for r in range(costs.cost.shape[0]):
        cheapest += costs.cost[r].min()
        least = np.inf
        for d in range(costs.cost.shape[1]):
            if costs.cost[r, d] < np.inf:
                least = min(least, alone_seconds(costs, r, d))
        soonest = max(soonest, least)
    return cheapest, soonest


@compiled_part
def candidate_pairs(costs: Costs, best_known: float) -> Pairs:
    """The pairs that an assignment with J below the best known can contain, by a simple test.

    A pair is out when even with every other request at its cheapest, and the makespan at its
    least, J would be no better.
    """
    n_requests, n_destinations = costs.cost.shape
    cheapest, soonest = _least_parts(costs)
    room = best_known - costs.constant - cheapest
    room += 1e-9 * max(1.0, abs(room))  # rounding must not take the best known itself away
    size = n_requests * n_destinations
    pairs = Pairs(
        np.zeros(n_requests + 1, dtype=np.int64),
        np.empty(size, dtype=np.int64),
        np.empty(size, dtype=np.int64),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
    )
    i = 0
    for r in range(n_requests):
        least = costs.cost[r].min()
        for d in range(n_destinations):
            if costs.cost[r, d] == np.inf:
                continue
            finish = alone_seconds(costs, r, d)
            if costs.cost[r, d] - least + costs.time_weight * max(soonest, finish) > room:
                continue
            pairs.destination[i] = d
            pairs.node[i] = costs.node_of[d]
            pairs.cost[i] = costs.cost[r, d]
            pairs.work[i] = costs.work[r, d]
            pairs.alone[i] = finish
            pairs.network[i] = costs.network[r, d]
            i += 1
        pairs.first[r + 1] = i
    return pairs


@compiled_part
def open_intervals(costs: Costs, best_known: float) -> Intervals:
    """The first intervals, with the bounds of every request at its cheapest."""
    cheapest, soonest = _least_parts(costs)
    intervals = Intervals(
        np.empty(MAX_INTERVALS),
        np.empty(MAX_INTERVALS),
        np.empty(MAX_INTERVALS),
        np.zeros((MAX_INTERVALS, costs.backlog.size)),
        np.zeros(MAX_INTERVALS, dtype=np.bool_),
        np.zeros(1, dtype=np.int64),
    )
    room = best_known - costs.constant - cheapest
    if costs.time_weight <= 0.0 or room <= costs.time_weight * soonest:
        # Nothing can be better, or the makespan does not count and the cheapest is the best.
        intervals.low[0] = intervals.high[0] = soonest
        intervals.bound[0] = costs.constant + cheapest + costs.time_weight * soonest
        intervals.held[0] = 1
        return intervals
    latest = room / costs.time_weight  # an assignment with a later makespan is no better
    for i in range(FIRST_INTERVALS):
        if soonest > 0.0:
            ratio = latest / soonest
            intervals.low[i] = soonest * ratio ** (i / FIRST_INTERVALS)
            intervals.high[i] = soonest * ratio ** ((i + 1) / FIRST_INTERVALS)
        else:
            intervals.low[i] = latest * i / FIRST_INTERVALS
            intervals.high[i] = latest * (i + 1) / FIRST_INTERVALS
        intervals.bound[i] = costs.constant + cheapest + costs.time_weight * intervals.low[i]
    intervals.high[FIRST_INTERVALS - 1] = max(intervals.high[FIRST_INTERVALS - 1], latest)
    intervals.held[0] = FIRST_INTERVALS
    return intervals


@compiled_part
def _raise_bound(
    costs: Costs,
    pairs: Pairs,
    intervals: Intervals,
    i: int,
    goal: float,
    steps: int,
    limits: Limits,
) -> None:
    """Raise the bound of interval i by subgradient steps; its prices become the best found."""
    low, high, prices = intervals.low[i], intervals.high[i], intervals.prices[i]
    n_nodes = costs.backlog.size
    n_requests = pairs.first.size - 1
    # Only what fits by `high`, packed, is looked at again and again.
    size = pairs.first[n_requests]
    first = np.zeros(n_requests + 1, dtype=np.int64)
    node = np.empty(size, dtype=np.int64)
    cost = np.empty(size)
    work = np.empty(size)
    least_network = np.full(n_nodes, np.inf)
    k = 0
    for r in range(n_requests):
        for j in range(pairs.first[r], pairs.first[r + 1]):
            if pairs.alone[j] <= high:
                n = pairs.node[j]
                node[k] = n
                cost[k] = pairs.cost[j]
                work[k] = pairs.work[j]
                least_network[n] = min(least_network[n], pairs.network[j])
                k += 1
        first[r + 1] = k
        if first[r + 1] == first[r]:
            intervals.bound[i] = np.inf  # no such makespan is possible
            return
    capacity = np.zeros(n_nodes)
    for n in range(n_nodes):
        if least_network[n] < np.inf:
            capacity[n] = max(0.0, high - costs.backlog[n] - least_network[n])
    slope = np.empty(n_nodes)
    trial = prices.copy()
    best = -np.inf
    pace = 1.0
    without_gain = 0
    for _ in range(steps):
        value = costs.constant + costs.time_weight * low
        for n in range(n_nodes):
            slope[n] = -capacity[n]
            value -= trial[n] * capacity[n]
        for r in range(n_requests):
            least = np.inf
            least_k = -1
            for j in range(first[r], first[r + 1]):
                priced = cost[j] + trial[node[j]] * work[j]
                if priced < least:
                    least = priced
                    least_k = j
            value += least
            slope[node[least_k]] += work[least_k]
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
        if best >= goal or exhausted(limits):
            break
        norm = 0.0
        for n in range(n_nodes):
            if slope[n] < 0.0 and trial[n] <= 0.0:
                slope[n] = 0.0  # the price cannot fall further
            norm += slope[n] * slope[n]
        if norm <= 0.0:
            break  # these prices are optimal
        length = pace * (goal - value) / norm
        for n in range(n_nodes):
            trial[n] = max(0.0, trial[n] + length * slope[n])
    intervals.bound[i] = max(intervals.bound[i], best)


@compiled_part
def least_bound(intervals: Intervals, best_known: float) -> Any:
    """float64: a value that no J is below; at most `best_known`."""
    least = best_known
    for i in range(intervals.held[0]):
        least = min(least, intervals.bound[i])
    return least


@compiled_part
def tighten(
    costs: Costs, pairs: Pairs, intervals: Intervals, best_known: float, limits: Limits
) -> None:
    """Raise the least bound by prices and by halving its interval.

    Ends at a limit, when nothing is left below the best known J, or when halving no longer helps.
    Valid whenever it stops: an interval not yet looked at carries the bound of the one that it
    was halved from.
    """
    n_requests = pairs.first.size - 1
    for r in range(n_requests):
        if pairs.first[r + 1] == pairs.first[r]:
            intervals.bound[: intervals.held[0]] = np.inf
            return
    if intervals.held[0] < FIRST_INTERVALS:
        return
    while not exhausted(limits):
        count = intervals.held[0]
        weakest: Any = np.int64(0)  # a plain 0 would be a type of its own to Numba
        for i in range(count):
            if intervals.bound[i] < intervals.bound[weakest]:
                weakest = i
        low, high = intervals.low[weakest], intervals.high[weakest]
        if (
            intervals.bound[weakest] >= best_known
            or count == MAX_INTERVALS
            or high - low <= 1e-5 * high
        ):
            return
        if not intervals.is_priced[weakest]:
            # One of the first intervals: its neighbour's prices are the best to begin with.
            if weakest > 0 and intervals.is_priced[weakest - 1]:
                intervals.prices[weakest] = intervals.prices[weakest - 1]
            _raise_bound(costs, pairs, intervals, weakest, best_known, FIRST_STEPS, limits)
            intervals.is_priced[weakest] = True
            continue
        middle = 0.5 * (low + high)
        intervals.low[count] = middle
        intervals.high[count] = high
        intervals.high[weakest] = middle
        intervals.bound[count] = intervals.bound[weakest]
        intervals.prices[count] = intervals.prices[weakest]
        intervals.is_priced[count] = True
        intervals.held[0] = count + 1
        _raise_bound(costs, pairs, intervals, weakest, best_known, STEPS, limits)
        _raise_bound(costs, pairs, intervals, count, best_known, STEPS, limits)


@compiled_part
def survivors(
    costs: Costs,
    pairs: Pairs,
    intervals: Intervals,
    best_known: float,
    share: float,
    kept: BoolArray,
    likely: BoolArray,
) -> None:
    """Fill `kept`, bool[R, D]: the pairs that an assignment with J below the best known can have.

    In an interval whose bound is below the best known, forcing a pair raises the relaxed value by
    the pair's reduced cost. What that leaves up to the best known is the interval's room.

    `likely`, bool[R, D], gets those that take at most a share of the room. Nothing is proven of
    the others; but the reduced costs of a better assignment add up to less than the room, so hardly
    any of its pairs takes much.
    """
    n_requests = pairs.first.size - 1
    kept[:] = False
    likely[:] = False
    n_pairs = pairs.first[n_requests]
    reduced = np.empty(n_pairs)
    least_network = np.empty(costs.backlog.size)
    for i in range(intervals.held[0]):
        if intervals.bound[i] >= best_known:
            continue
        high = intervals.high[i]
        prices = intervals.prices[i]
        value = costs.constant + costs.time_weight * intervals.low[i]
        least_network[:] = np.inf
        for r in range(n_requests):
            least = np.inf
            for j in range(pairs.first[r], pairs.first[r + 1]):
                reduced[j] = np.inf
                if pairs.alone[j] <= high:
                    n = pairs.node[j]
                    least_network[n] = min(least_network[n], pairs.network[j])
                    reduced[j] = pairs.cost[j] + prices[n] * pairs.work[j]
                    least = min(least, reduced[j])
            value += least
            for j in range(pairs.first[r], pairs.first[r + 1]):
                reduced[j] -= least
        for n in range(costs.backlog.size):
            if least_network[n] < np.inf:
                value -= prices[n] * max(0.0, high - costs.backlog[n] - least_network[n])
        room = best_known - value + 1e-9 * max(1.0, abs(best_known))
        for r in range(n_requests):
            for j in range(pairs.first[r], pairs.first[r + 1]):
                if reduced[j] <= room:
                    d = pairs.destination[j]
                    kept[r, d] = True
                    if reduced[j] <= share * room:
                        likely[r, d] = True


@compiled_part
def thin(pairs: Pairs, kept: BoolArray) -> None:
    """Leave only the kept pairs, bool[R, D], in place: what follows is the faster for it."""
    i = 0
    begin = 0
    for r in range(pairs.first.size - 1):
        end = pairs.first[r + 1]
        for j in range(begin, end):
            if kept[r, pairs.destination[j]]:
                pairs.destination[i] = pairs.destination[j]
                pairs.node[i] = pairs.node[j]
                pairs.cost[i] = pairs.cost[j]
                pairs.work[i] = pairs.work[j]
                pairs.alone[i] = pairs.alone[j]
                pairs.network[i] = pairs.network[j]
                i += 1
        begin = end
        pairs.first[r + 1] = i


@compiled_without_gil
def _lower_bound(costs: Costs, best_known: float, limits: Limits) -> float:
    pairs = candidate_pairs(costs, best_known)
    intervals = open_intervals(costs, best_known)
    tighten(costs, pairs, intervals, best_known, limits)
    return float(least_bound(intervals, best_known)) - ROUNDING


def lower_bound(problem: RoutingProblem, best_known: float, budget: Budget) -> float:
    """A value that no assignment's J is below; at most `best_known`.

    Args:
        problem: the arrays.
        best_known: J of some assignment; the better it is, the better the bound.
        budget: how long to tighten it.
    """
    started = time.monotonic_ns()
    deadline = None if budget.seconds is None else started + int(budget.seconds * 1e9)
    costs, _, rows, _ = scalarise(problem)
    if not rows.size:
        return 0.0
    return _lower_bound(costs, best_known, limits_until(deadline, budget.max_evaluations))
