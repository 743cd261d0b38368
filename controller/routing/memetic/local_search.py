"""Local search with the makespan as a hard cap.

The makespan of most neighbours of an assignment is the same, so a search on J walks over
plateaus. With the makespan as a capacity of every node only the separable cost is left to
improve, and moves that never touch the critical node count as well.

Neighbourhoods: shift a request; a chain, where a request takes a place on a node by pushing one
of its requests elsewhere (a swap is the chain whose second request goes where the first was).
All scan destinations in order of a request's cost, so a scan ends at the first that fits.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from controller.routing.compiled import Limits, compiled, compiled_part, exhausted, stable_order
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
from controller.routing.node_loads import Costs
from controller.routing.problem import FloatArray, IntArray

SLACK = 1e-9
"""Relative excess over a cap that counts as rounding."""

LEAST_GAIN = 1e-11
"""A smaller gain of cost is rounding; J is of the order of 1."""

START: Final[Any] = np.int64(0)
"""Where a list begins. Of a NumPy type for the reason that END is."""

LOOK_AT_CLOCK = 8
"""Requests between two looks at the clock."""


class Neighbourhood(NamedTuple):
    """What moves are drawn from, and the cheapest exit of every request.

    A request's exit is the cheapest destination on another node that has room for it.

    Attributes:
        order: int64[R, D]; a request's destinations, cheapest first.
        counts: int64[R]; how many of them are feasible.
        first: int64[N + 1]; where a node's destinations begin in `of_node`.
        of_node: int64[D].
        exit_place: int64[R]; where in `order`; `counts` when there is none.
        exit_cost: float64[R]; infinite when there is none.
        place: int64[R, D]; where a destination stands in `order`; END when it is not listed.
        changed: int64[N]; when something last happened on a node that may let a chain pay: its
            load changed, or one of its requests got a cheaper exit.
        scanned: int64[R]; when no chain of a request was last found to pay.
        clock: int64[1]; counts the changes.
    """

    order: IntArray
    counts: IntArray
    first: IntArray
    of_node: IntArray
    exit_place: IntArray
    exit_cost: FloatArray
    place: IntArray
    changed: IntArray
    scanned: IntArray
    clock: IntArray


@compiled_part
def by_cost(cost: FloatArray) -> tuple[IntArray, IntArray]:
    """Each request's destinations, cheapest first, and how many of them are feasible.

    Returns:
        int64[R, D] and int64[R].
    """
    n_requests, n_destinations = cost.shape
    order = np.empty((n_requests, n_destinations), dtype=np.int64)
    counts = np.zeros(n_requests, dtype=np.int64)
    for r in range(n_requests):
        order[r] = stable_order(cost[r])
        for d in range(n_destinations):
            if cost[r, d] < np.inf:
                counts[r] += 1
    return order, counts


@compiled_part
def _fits(costs: Costs, loads: Loads, r: int, d: int, cap: float) -> Any:
    """Whether request r may go to destination d instead of where it is."""
    b = costs.node_of[d]
    if costs.node_of[loads.x[r]] == b:
        return finish_exchanged(costs, loads, b, r, r, d) <= cap
    return finish_with(costs, loads, b, r, d) <= cap


@compiled_part
def _stamp(around: Neighbourhood, n: int) -> None:
    """Note that chains by way of node n may pay again."""
    around.clock[0] += 1
    around.changed[n] = around.clock[0]


@compiled_part
def _move_and_note(costs: Costs, loads: Loads, around: Neighbourhood, r: int, d: int) -> None:
    """Send r to d and note both nodes."""
    _stamp(around, costs.node_of[loads.x[r]])
    _stamp(around, costs.node_of[d])
    move(costs, loads, r, d)


@compiled
def shed(costs: Costs, loads: Loads, around: Neighbourhood, cap: float, limits: Limits) -> bool:
    """Move requests off nodes that finish after the cap, at the least extra cost per second.

    Returns whether every node now finishes by the cap.
    """
    cap = cap * (1.0 + SLACK)
    n_requests = loads.x.size
    for _ in range(4 * n_requests):
        worst = END
        overflow = 0.0
        for n in range(loads.queued.size):
            excess = finish(costs, loads, n) - cap
            if excess > overflow:
                worst, overflow = n, excess
        if worst < 0:
            return True
        best_score = np.inf
        best_r = END
        best_d = END
        r = loads.first[worst]
        while r != END:
            here = loads.x[r]
            base = costs.cost[r, here]
            relief = overflow + cap - finish_without(costs, loads, worst, r)
            relief = max(min(relief, overflow), 1e-3 * min(costs.work[r, here], overflow))
            relief = max(relief, 1e-9 * overflow)
            for k in range(around.counts[r]):
                d = around.order[r, k]
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
        _move_and_note(costs, loads, around, best_r, best_d)
    return False


@compiled_part
def destinations_by_node(costs: Costs) -> tuple[IntArray, IntArray]:
    """int64[N + 1] and int64[D]: where each node's destinations begin, and the destinations."""
    n_nodes = costs.backlog.size
    first = np.zeros(n_nodes + 1, dtype=np.int64)
    for d in range(costs.node_of.size):
        first[costs.node_of[d] + 1] += 1
    for n in range(n_nodes):
        first[n + 1] += first[n]
    return first, stable_order(costs.node_of)


@compiled
def new_search(costs: Costs) -> Neighbourhood:
    """What one local search after another works with."""
    n_requests = costs.cost.shape[0]
    order, counts = by_cost(costs.cost)
    first, of_node = destinations_by_node(costs)
    around = Neighbourhood(
        order,
        counts,
        first,
        of_node,
        np.zeros(n_requests, dtype=np.int64),
        np.zeros(n_requests),
        np.empty(order.shape, dtype=np.int64),
        np.zeros(costs.backlog.size, dtype=np.int64),
        np.full(n_requests, -1, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )
    note_places(around)
    return around


@compiled_part
def note_places(around: Neighbourhood) -> None:
    """Fill `place` after `order` or `counts` have changed."""
    around.place[:] = END
    for r in range(around.counts.size):
        for k in range(around.counts[r]):
            around.place[r, around.order[r, k]] = k


@compiled_part
def _look(
    costs: Costs,
    loads: Loads,
    around: Neighbourhood,
    r: int,
    start: int,
    cap: float,
    limits: Limits,
) -> None:
    """Find the cheapest exit of request r, from position `start` of its list on."""
    home = costs.node_of[loads.x[r]]
    for k in range(start, around.counts[r]):
        d = around.order[r, k]
        n = costs.node_of[d]
        if n == home:
            continue
        limits.evaluations[0] += 1
        if finish_with(costs, loads, n, r, d) <= cap:
            around.exit_place[r] = k
            around.exit_cost[r] = costs.cost[r, d]
            return
    around.exit_place[r] = around.counts[r]
    around.exit_cost[r] = np.inf


@compiled_part
def _look_at_node(
    costs: Costs, loads: Loads, around: Neighbourhood, s: int, n: int, cap: float
) -> None:
    """Take note if node n, which has become emptier, is a cheaper exit of request s."""
    for i in range(around.first[n], around.first[n + 1]):
        d = around.of_node[i]
        if (
            costs.cost[s, d] < around.exit_cost[s]
            and around.place[s, d] != END
            and finish_with(costs, loads, n, s, d) <= cap
        ):
            around.exit_place[s] = around.place[s, d]
            around.exit_cost[s] = costs.cost[s, d]
            _stamp(around, costs.node_of[loads.x[s]])


@compiled_part
def _after_change(
    costs: Costs,
    loads: Loads,
    around: Neighbourhood,
    emptier: int,
    fuller: int,
    cap: float,
    limits: Limits,
) -> None:
    """Mend every request's exit after the loads of two nodes have changed."""
    for s in range(loads.x.size):
        k = around.exit_place[s]
        if k < around.counts[s]:
            d = around.order[s, k]
            if costs.node_of[d] == fuller and finish_with(costs, loads, fuller, s, d) > cap:
                # What was too full before, is too full still.
                _look(costs, loads, around, s, k + 1, cap, limits)
        if costs.node_of[loads.x[s]] != emptier:
            _look_at_node(costs, loads, around, s, emptier, cap)


@compiled_part
def _after_chain(
    costs: Costs,
    loads: Loads,
    around: Neighbourhood,
    a: int,
    b: int,
    c: int,
    cap: float,
    limits: Limits,
) -> None:
    """Mend every request's exit after a chain from node a to b and from b to c.

    Any of the three may have become fuller, and a or b emptier.
    """
    for s in range(loads.x.size):
        k = around.exit_place[s]
        if k < around.counts[s]:
            d = around.order[s, k]
            n = costs.node_of[d]
            if n in (a, b, c) and finish_with(costs, loads, n, s, d) > cap:
                _look(costs, loads, around, s, k + 1, cap, limits)
        home = costs.node_of[loads.x[s]]
        if home != a:
            _look_at_node(costs, loads, around, s, a, cap)
        if home != b:
            _look_at_node(costs, loads, around, s, b, cap)


@compiled_part
def _relocate(
    costs: Costs,
    loads: Loads,
    around: Neighbourhood,
    r: int,
    d: int,
    cap: float,
    limits: Limits,
) -> None:
    """Send r to d and mend the exits."""
    emptier = costs.node_of[loads.x[r]]
    fuller = costs.node_of[d]
    move(costs, loads, r, d)
    _stamp(around, emptier)
    _stamp(around, fuller)
    _after_change(costs, loads, around, emptier, fuller, cap, limits)
    if emptier != fuller:
        _look(costs, loads, around, r, START, cap, limits)


@compiled_part
def _shift(costs: Costs, loads: Loads, around: Neighbourhood, cap: float, limits: Limits) -> bool:
    """Send every request, once, to its cheapest destination that fits. Whether any moved."""
    moved = False
    for r in range(loads.x.size):
        here = costs.cost[r, loads.x[r]]
        target = END
        if around.exit_cost[r] < here - LEAST_GAIN:
            target = around.order[r, around.exit_place[r]]
            here = around.exit_cost[r]
        n = costs.node_of[loads.x[r]]
        for i in range(around.first[n], around.first[n + 1]):
            d = around.of_node[i]
            if costs.cost[r, d] < here - LEAST_GAIN:
                limits.evaluations[0] += 1
                if finish_exchanged(costs, loads, n, r, r, d) <= cap:
                    target = d
                    here = costs.cost[r, d]
        if target >= 0:
            _relocate(costs, loads, around, r, target, cap, limits)
            moved = True
    return moved


@compiled_part
def _chain(costs: Costs, loads: Loads, around: Neighbourhood, cap: float, limits: Limits) -> bool:
    """For every request, once, the best chain that it can start. Whether any moved.

    Request r goes to d on node b; request s of b makes room and leaves by its exit, or goes to
    where r was. r gains, or no chain pays; s may lose less than that.
    """
    moved = False
    for r in range(loads.x.size):
        if r % LOOK_AT_CLOCK == 0 and exhausted(limits):
            return moved
        from_d = loads.x[r]
        a = costs.node_of[from_d]
        here = costs.cost[r, from_d]
        since = around.scanned[r]
        anew = around.changed[a] > since
        around.scanned[r] = around.clock[0]
        best = -LEAST_GAIN
        best_d = END
        best_s = END
        best_e = END
        for k in range(around.counts[r]):
            d = around.order[r, k]
            gain = costs.cost[r, d] - here
            if gain >= best:
                break
            b = costs.node_of[d]
            if b == a or not (anew or around.changed[b] > since):
                continue
            s = loads.first[b]
            while s != END:
                limits.evaluations[0] += 1
                lost = gain - costs.cost[s, loads.x[s]]
                least = best
                e = END
                if lost + around.exit_cost[s] < least:
                    least = lost + around.exit_cost[s]
                    e = around.order[s, around.exit_place[s]]
                for i in range(around.first[a], around.first[a + 1]):
                    other = around.of_node[i]
                    if lost + costs.cost[s, other] < least and (
                        finish_exchanged(costs, loads, a, r, s, other) <= cap
                    ):
                        least = lost + costs.cost[s, other]
                        e = other
                if e >= 0 and finish_exchanged(costs, loads, b, s, r, d) <= cap:
                    best = least
                    best_d, best_s, best_e = d, s, e
                s = loads.after[s]
        if best_s >= 0:
            b = costs.node_of[best_d]
            c = costs.node_of[best_e]
            take(costs, loads, r)
            take(costs, loads, best_s)
            put(costs, loads, r, best_d)
            put(costs, loads, best_s, best_e)
            _stamp(around, a)
            _stamp(around, b)
            _stamp(around, c)
            _after_chain(costs, loads, around, a, b, c, cap, limits)
            _look(costs, loads, around, r, START, cap, limits)
            _look(costs, loads, around, best_s, START, cap, limits)
            around.scanned[r] = -1
            moved = True
    return moved


@compiled
def improve(
    costs: Costs,
    loads: Loads,
    around: Neighbourhood,
    cap: float,
    limits: Limits,
    afresh: bool,
) -> None:
    """Shifts until none is left, then chains, and again until neither finds anything.

    Every node must finish by the cap already, and does so afterwards.

    Args:
        costs: the weighed problem.
        loads: the assignment.
        around: its lists.
        cap: seconds.
        limits: when to stop; what is reached by then keeps the cap.
        afresh: False when the last call was about the same assignment but for what `shed` has
            moved since, under this cap or a greater one: chains that did not pay then are looked
            at again only where something has changed.
    """
    cap = cap * (1.0 + SLACK)
    if afresh:
        around.scanned[:] = -1
    for r in range(loads.x.size):
        before = around.exit_cost[r]
        _look(costs, loads, around, r, START, cap, limits)
        if around.exit_cost[r] < before:
            _stamp(around, costs.node_of[loads.x[r]])
    while not exhausted(limits):
        while _shift(costs, loads, around, cap, limits):
            pass
        if not _chain(costs, loads, around, cap, limits):
            return


@compiled_part
def shift_all(
    costs: Costs, loads: Loads, around: Neighbourhood, cap: float, limits: Limits
) -> None:
    """Shifts alone until none is left: worse than `improve`, and much sooner done."""
    cap = cap * (1.0 + SLACK)
    for r in range(loads.x.size):
        _look(costs, loads, around, r, START, cap, limits)
    while not exhausted(limits) and _shift(costs, loads, around, cap, limits):
        pass
