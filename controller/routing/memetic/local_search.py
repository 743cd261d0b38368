"""Local search with the makespan as a hard cap.

The makespan of most neighbours of an assignment is the same, so a search on J walks over
plateaus. With the makespan as a capacity of every node only the separable cost is left to
improve, and moves that never touch the critical node count as well.

Neighbourhoods: shift a request; a chain, where a request takes a place on a node by pushing one
of its requests elsewhere (a swap is the chain whose second request goes where the first was).
All scan destinations in order of a request's cost, so a scan ends at the first that fits.
"""

from typing import Any

import numpy as np

from controller.routing.compiled import Limits, compiled, exhausted
from controller.routing.memetic.loads import (
    END,
    Loads,
    finish,
    finish_exchanged,
    finish_with,
    finish_without,
    move,
    put,
    take,
)
from controller.routing.objective import Costs
from controller.routing.problem import FloatArray, IntArray

SLACK = 1e-9
"""Relative excess over a cap that counts as rounding."""

LEAST_GAIN = 1e-11
"""A smaller gain of cost is rounding; J is of the order of 1."""


@compiled
def by_cost(cost: FloatArray) -> tuple[IntArray, IntArray]:
    """Each request's destinations, cheapest first, and how many of them are feasible.

    Returns:
        int64[R, D] and int64[R].
    """
    n_requests, n_destinations = cost.shape
    order = np.empty((n_requests, n_destinations), dtype=np.int64)
    counts = np.zeros(n_requests, dtype=np.int64)
    for r in range(n_requests):
        order[r] = np.argsort(cost[r], kind="mergesort")
        for d in range(n_destinations):
            if cost[r, d] < np.inf:
                counts[r] += 1
    return order, counts


@compiled
def _fits(costs: Costs, loads: Loads, r: int, d: int, cap: float) -> Any:
    """Whether request r may go to destination d instead of where it is."""
    b = costs.node_of[d]
    if costs.node_of[loads.x[r]] == b:
        return finish_exchanged(costs, loads, b, r, r, d) <= cap
    return finish_with(costs, loads, b, r, d) <= cap


@compiled
def shed(
    costs: Costs, loads: Loads, order: IntArray, counts: IntArray, cap: float, limits: Limits
) -> bool:
    """Move requests off nodes that finish after the cap, at the least extra cost per second.

    Returns whether every node now finishes by the cap.
    """
    cap = cap * (1.0 + SLACK)
    n_requests = loads.x.size
    for _ in range(4 * n_requests):
        worst = -1
        overflow = 0.0
        for n in range(loads.queued.size):
            excess = finish(costs, loads, n) - cap
            if excess > overflow:
                worst, overflow = n, excess
        if worst < 0:
            return True
        best_score = np.inf
        best_r = -1
        best_d = -1
        r = loads.first[worst]
        while r != END:
            here = loads.x[r]
            base = costs.cost[r, here]
            relief = overflow + cap - finish_without(costs, loads, worst, r)
            relief = max(min(relief, overflow), 1e-3 * min(costs.work[r, here], overflow))
            relief = max(relief, 1e-9 * overflow)
            for k in range(counts[r]):
                d = order[r, k]
                extra = costs.cost[r, d] - base
                if extra > 0.0 and extra >= best_score * relief:
                    break
                if d == here:
                    continue
                limits.evaluations[0] += 1
                if _fits(costs, loads, r, d, cap):
                    score = extra / relief if extra > 0.0 else extra * relief
                    if score < best_score:
                        best_score, best_r, best_d = score, r, d
                    break
            r = loads.after[r]
        if best_r < 0:
            return False
        move(costs, loads, best_r, best_d)
        if exhausted(limits):
            return False
    return False


@compiled
def shift(
    costs: Costs, loads: Loads, order: IntArray, counts: IntArray, cap: float, limits: Limits
) -> bool:
    """Send every request, once, to its cheapest destination that fits. Whether any moved."""
    cap = cap * (1.0 + SLACK)
    moved = False
    for r in range(loads.x.size):
        here = costs.cost[r, loads.x[r]]
        for k in range(counts[r]):
            d = order[r, k]
            if costs.cost[r, d] >= here - LEAST_GAIN:
                break
            limits.evaluations[0] += 1
            if _fits(costs, loads, r, d, cap):
                move(costs, loads, r, d)
                moved = True
                break
    return moved


@compiled
def chain(
    costs: Costs, loads: Loads, order: IntArray, counts: IntArray, cap: float, limits: Limits
) -> bool:
    """For every request, once, the best chain that it can start. Whether any moved.

    Request r goes to d on node b; request s of b makes room and goes to e, which may be where r
    was. r gains, or no chain pays; s may lose less than that.
    """
    cap = cap * (1.0 + SLACK)
    moved = False
    for r in range(loads.x.size):
        if exhausted(limits):
            return moved
        from_d = loads.x[r]
        a = costs.node_of[from_d]
        here = costs.cost[r, from_d]
        best = -LEAST_GAIN
        best_d = -1
        best_s = -1
        best_e = -1
        for k in range(counts[r]):
            d = order[r, k]
            gain = costs.cost[r, d] - here
            if gain >= best:
                break
            b = costs.node_of[d]
            if b == a:
                continue
            s = loads.first[b]
            while s != END:
                limits.evaluations[0] += 1
                if finish_exchanged(costs, loads, b, s, r, d) <= cap:
                    at = loads.x[s]
                    budget = best - gain + costs.cost[s, at]
                    for j in range(counts[s]):
                        e = order[s, j]
                        if costs.cost[s, e] >= budget:
                            break
                        n = costs.node_of[e]
                        if n == b:
                            continue
                        limits.evaluations[0] += 1
                        if n == a:
                            fits = finish_exchanged(costs, loads, a, r, s, e) <= cap
                        else:
                            fits = finish_with(costs, loads, n, s, e) <= cap
                        if fits:
                            best = gain + costs.cost[s, e] - costs.cost[s, at]
                            best_d, best_s, best_e = d, s, e
                            break
                s = loads.after[s]
        if best_s >= 0:
            take(costs, loads, r)
            take(costs, loads, best_s)
            put(costs, loads, r, best_d)
            put(costs, loads, best_s, best_e)
            moved = True
    return moved


@compiled
def improve(
    costs: Costs,
    loads: Loads,
    order: IntArray,
    counts: IntArray,
    cap: float,
    with_chains: bool,
    limits: Limits,
) -> None:
    """Shifts until none is left, then chains, and again until neither finds anything."""
    while True:
        while shift(costs, loads, order, counts, cap, limits):
            if exhausted(limits):
                return
        if not with_chains or exhausted(limits):
            return
        if not chain(costs, loads, order, counts, cap, limits):
            return
