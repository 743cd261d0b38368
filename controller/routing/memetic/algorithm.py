"""The search that serves: anytime, memetic, guided by the prices of its own lower bound.

1. The four single-term assignments and a coarse descent of the makespan's cap give a first J.
2. Lower bounds by makespan interval (`controller.routing.bounds`) price the work of each node. The
   prices show which pairs no better assignment can contain, which few a better one is likely to
   contain, and, for every interval that may hold a better one, where each request goes when it
   pays for the room that it takes: made to fit, that is a good assignment at once.
3. Offspring of the elite, by kicks or crossover, are repaired under a drawn cap and made local
   optima (Lamarckian: the improved assignment is what enters the elite), the cap following the
   makespan down for as long as J falls.

Steps 2 and 3 happen in rounds, each with the better J that the last has found.
"""

import time
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controller.routing.bounds import (
    MAX_INTERVALS,
    ROUNDING,
    Intervals,
    Pairs,
    candidate_pairs,
    least_bound,
    open_intervals,
    survivors,
    thin,
    tighten,
)
from controller.routing.compiled import (
    Limits,
    compiled_part,
    compiled_without_gil,
    exhausted,
    limits_until,
    nanoseconds,
    random_index,
    random_state,
    random_unit,
)
from controller.routing.memetic.loads import (
    Loads,
    empty_loads,
    load_assignment,
    makespan,
    move,
    separable_cost,
)
from controller.routing.memetic.local_search import (
    Neighbourhood,
    improve,
    new_search,
    note_places,
    shed,
    shift_all,
)
from controller.routing.node_loads import Costs
from controller.routing.objective import scalarise
from controller.routing.policy import UNASSIGNED, Budget, Decision
from controller.routing.problem import BoolArray, FloatArray, IntArray, RoutingProblem

ELITE: Final = 12
"""Assignments in the elite."""

NICHE: Final = 0.01
"""Of assignments whose makespans differ relatively by less, only the best stays."""

DESCENT_STEP: Final = 0.85
"""Factor by which the cap falls in the first descent."""

CROSSOVER_SHARE: Final = 0.3
"""Offspring with two parents; the others are kicked copies of one."""

MOST_KICKS_SHARE: Final = 1.0 / 32.0
"""Most requests that a kick sends elsewhere, as a share of the batch; 3 are always allowed."""

NARROW: Final = 0.03
"""Usual relative distance of an offspring's cap from its mother's makespan, either way."""

WIDE: Final = 0.3
"""The same for a few offspring, which look for quite another makespan."""

NARROW_SHARE: Final = 0.8
"""Offspring with a narrow distance."""

TIGHTEN: Final = 0.003
"""Relative step of the cap below the makespan reached, while J falls."""

PROMISING: Final = 0.006
"""Relative distance from the best J within which the cap is lowered at all."""

STALL_PER_REQUEST: Final = 300
"""Offspring without a new best, per request of the batch, after which the search is over."""

NEAR: Final = 0.2
"""Share of the room below the best J that the reduced cost of a likely pair takes at most."""

ROUNDS: Final = ((0.08, NEAR, 0.0), (0.1, NEAR, 0.5), (0.15, NEAR, 1.0), (0.15, 1.0, 1.0))
"""Of each round: the share of what is left of the budget that the bound gets; the share of the room
that the pairs looked at may take, 1 for all that are not proven useless; the share of what is then
left that offspring get. A round gets what the last has left, so the last one begins only when
nothing has improved for long."""

WORTH_ROUNDING: Final = 0.4
"""Room below the best J, relative to that of the weakest interval, from which on an interval's
prices are rounded: what comes of it lies well above the bound."""

MOST_RESERVE_SHARE: Final = 0.5
"""Share of a time budget that the way back and pauses of the machine may cost at most: beyond it a
late answer is better than a bad one."""


class Elite(NamedTuple):
    """The population, best first.

    Attributes:
        x: int64[E, R].
        scores: float64[E]; J without the constant.
        spans: float64[E], seconds; the makespans.
        filled: int64[1]; how many there are.
    """

    x: IntArray
    scores: FloatArray
    spans: FloatArray
    filled: IntArray


@compiled_part
def _join(costs: Costs, loads: Loads, elite: Elite) -> Any:
    """float64: J, without the constant, of the assignment in `loads`, which asks for a place.

    Of assignments with nearly the same makespan only the best stays: those of almost the best J
    at quite another makespan are the ones that a search around the best never finds.
    """
    seconds = makespan(costs, loads)
    j = separable_cost(costs, loads.x) + costs.time_weight * seconds
    filled = elite.filled[0]
    size = elite.scores.size
    if filled == size and j >= elite.scores[size - 1]:
        return j
    place = -1
    for i in range(filled):
        if abs(elite.spans[i] - seconds) <= NICHE * seconds:
            if elite.scores[i] <= j + 1e-12:
                return j
            place = i
    if place < 0:
        place = min(filled, size - 1)
        elite.filled[0] = max(filled, place + 1)
    while place > 0 and elite.scores[place - 1] > j:
        elite.x[place] = elite.x[place - 1]
        elite.scores[place] = elite.scores[place - 1]
        elite.spans[place] = elite.spans[place - 1]
        place -= 1
    elite.x[place] = loads.x
    elite.scores[place] = j
    elite.spans[place] = seconds
    return j


@compiled_part
def _descend(
    costs: Costs, loads: Loads, around: Neighbourhood, elite: Elite, limits: Limits
) -> None:
    """Lower the cap from where every request is at its cheapest, by shifts alone.

    Until the separable cost alone is no better than the best J.
    """
    start = around.order[:, 0].copy()
    load_assignment(costs, loads, start)
    _join(costs, loads, elite)
    cap = makespan(costs, loads)
    while not exhausted(limits):
        cap *= DESCENT_STEP
        if not shed(costs, loads, around, cap, limits):
            break
        shift_all(costs, loads, around, cap, limits)
        _join(costs, loads, elite)
        if separable_cost(costs, loads.x) >= elite.scores[0]:
            break
        cap = min(cap, makespan(costs, loads))


@compiled_part
def _vary(
    costs: Costs,
    loads: Loads,
    around: Neighbourhood,
    elite: Elite,
    mother: int,
    state: NDArray[np.uint64],
) -> None:
    """Make `loads` a varied copy of an elite assignment.

    Crossover is uniform over the genes in which the parents differ, at a drawn rate: positions
    in a batch mean nothing, so there is nothing for neighbouring genes to keep together. Kicks
    go to any listed destination.
    """
    n_requests = loads.x.size
    filled = elite.filled[0]
    load_assignment(costs, loads, elite.x[mother])
    if filled > 1 and random_unit(state) < CROSSOVER_SHARE:
        father = random_index(state, filled - 1)
        if father >= mother:
            father += 1
        rate = random_unit(state)
        for r in range(n_requests):
            if elite.x[father, r] != loads.x[r] and random_unit(state) < rate:
                move(costs, loads, r, elite.x[father, r])
        return
    most = max(3, int(MOST_KICKS_SHARE * n_requests))
    for _ in range(1 + random_index(state, most)):
        r = random_index(state, n_requests)
        move(costs, loads, r, around.order[r, random_index(state, around.counts[r])])


@compiled_part
def _evolve(
    costs: Costs,
    loads: Loads,
    around: Neighbourhood,
    elite: Elite,
    state: NDArray[np.uint64],
    limits: Limits,
) -> None:
    """Offspring of the elite, each made a local optimum, until a limit or a stall."""
    n_requests = loads.x.size
    stalled = 0
    while stalled < STALL_PER_REQUEST * n_requests and not exhausted(limits):
        best = elite.scores[0]
        filled = elite.filled[0]
        mother = min(random_index(state, filled), random_index(state, filled))
        width = NARROW if random_unit(state) < NARROW_SHARE else WIDE
        cap = elite.spans[mother] * (1.0 + width * (2.0 * random_unit(state) - 1.0))
        _vary(costs, loads, around, elite, mother, state)
        limits.evaluations[0] += 1
        _polish(costs, loads, around, elite, cap, limits)
        stalled = 0 if elite.scores[0] < best - 1e-12 else stalled + 1


@compiled_part
def _polish(
    costs: Costs, loads: Loads, around: Neighbourhood, elite: Elite, cap: float, limits: Limits
) -> None:
    """Make the assignment a local optimum under the cap, then under lower ones while J falls."""
    best = elite.scores[0]
    reached = np.inf
    afresh = True
    while shed(costs, loads, around, cap, limits):
        improve(costs, loads, around, cap, limits, afresh)
        afresh = False
        j = _join(costs, loads, elite)
        if j >= reached - 1e-12 or j > best + PROMISING * abs(best) or exhausted(limits):
            return
        reached = j
        cap = makespan(costs, loads) * (1.0 - TIGHTEN)


@compiled_part
def _round(
    costs: Costs,
    loads: Loads,
    around: Neighbourhood,
    elite: Elite,
    pairs: Pairs,
    intervals: Intervals,
    rounded: FloatArray,
    limits: Limits,
) -> None:
    """Round the prices of each promising interval, once, to an assignment that is locally optimal.

    Every request goes where its cost and the price of its work are least; what is too much for the
    interval is shed.

    Args:
        costs: the weighed problem.
        loads: scratch.
        around: the lists.
        elite: the assignments join it.
        pairs: those that are left.
        intervals: with their prices.
        rounded: float64[MAX_INTERVALS]; upper end of each interval when it was last rounded.
        limits: when to stop.
    """
    n_requests = loads.x.size
    x = np.empty(n_requests, dtype=np.int64)
    for i in range(intervals.held[0]):
        best = elite.scores[0] + costs.constant
        if exhausted(limits):
            return
        least_room = WORTH_ROUNDING * (best - least_bound(intervals, best))
        if best - intervals.bound[i] <= least_room or rounded[i] == intervals.high[i]:
            continue
        rounded[i] = intervals.high[i]
        high = intervals.high[i]
        for r in range(n_requests):
            least = np.inf
            x[r] = UNASSIGNED
            for k in range(pairs.first[r], pairs.first[r + 1]):
                priced = pairs.cost[k] + intervals.prices[i, pairs.node[k]] * pairs.work[k]
                if pairs.alone[k] <= high and priced < least:
                    least = priced
                    x[r] = pairs.destination[k]
            if x[r] < 0:
                break
        if x.min() < 0:
            continue
        load_assignment(costs, loads, x)
        limits.evaluations[0] += 1
        _polish(costs, loads, around, elite, high, limits)


@compiled_part
def _leave_only(around: Neighbourhood, kept: BoolArray, order: IntArray, counts: IntArray) -> None:
    """Make the kept pairs, bool[R, D], the only ones in the lists that moves are drawn from.

    `order` and `counts` are the lists of all.
    """
    for r in range(around.counts.size):
        k = 0
        for i in range(counts[r]):
            if kept[r, order[r, i]]:
                around.order[r, k] = order[r, i]
                k += 1
        if k > 0:  # none is left only where rounding took the best known assignment's own
            around.counts[r] = k
    note_places(around)


@compiled_part
def _share_of(limits: Limits, share: float) -> Limits:
    """The limits of a share of what is left."""
    deadline = limits.deadline_nanoseconds
    if deadline >= 0:
        now = nanoseconds(limits)
        deadline = now + np.int64(share * max(0, deadline - now))
    evaluations = limits.max_evaluations
    if evaluations >= 0:
        done = limits.evaluations[0]
        evaluations = done + np.int64(share * max(0, evaluations - done))
    return Limits(
        limits.clock,
        limits.clock_id,
        deadline,
        limits.end_nanoseconds,
        limits.most_reserve_nanoseconds,
        limits.pauses,
        evaluations,
        limits.evaluations,
    )


@compiled_without_gil
def search(
    costs: Costs, seeds: IntArray, state: NDArray[np.uint64], limits: Limits
) -> tuple[IntArray, float, float]:
    """Search until a limit, a stall, or until the bound is met.

    Args:
        costs: the weighed problem; at least one request.
        seeds: int64[K, R]; legal assignments to begin with, at least one.
        state: uint64[1]; of the random numbers.
        limits: when to stop.

    Returns:
        The best assignment, int64[R], its J, and a lower bound of J.
    """
    n_requests = costs.cost.shape[0]
    around = new_search(costs)
    loads = empty_loads(n_requests, costs.backlog.size)
    elite = Elite(
        np.zeros((ELITE, n_requests), dtype=np.int64),
        np.full(ELITE, np.inf),
        np.zeros(ELITE),
        np.zeros(1, dtype=np.int64),
    )
    for k in range(seeds.shape[0]):
        load_assignment(costs, loads, seeds[k])
        limits.evaluations[0] += 1
        _join(costs, loads, elite)
    _descend(costs, loads, around, elite, limits)

    best = elite.scores[0] + costs.constant
    intervals = open_intervals(costs, best)
    kept = np.empty(costs.cost.shape, dtype=np.bool_)
    likely = np.empty(costs.cost.shape, dtype=np.bool_)
    pairs = candidate_pairs(costs, best)
    order = around.order.copy()
    counts = around.counts.copy()
    rounded = np.zeros(MAX_INTERVALS)
    for bound_share, near, offspring_share in ROUNDS:
        if exhausted(limits):
            break
        tighten(costs, pairs, intervals, best, _share_of(limits, bound_share))
        if least_bound(intervals, best) >= best:
            break
        survivors(costs, pairs, intervals, best, near, kept, likely)
        thin(pairs, kept)
        _leave_only(around, likely, order, counts)
        _round(costs, loads, around, elite, pairs, intervals, rounded, limits)
        _evolve(costs, loads, around, elite, state, _share_of(limits, offspring_share))
        best = elite.scores[0] + costs.constant
    return elite.x[0].copy(), best, least_bound(intervals, best) - ROUNDING


@dataclass(frozen=True, slots=True)
class MemeticPolicy:
    """Joint assignment of the batch by makespan descent and memetic search.

    On a busy machine the thread that searches is stopped for milliseconds at a time, and a pause
    across the end of the budget makes the answer late. So it stops earlier by the longest pause
    that it, or by the budget earlier decisions, have met.
    """

    name: str = "memetic"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """The best assignment found until the budget ends or nothing improves any more."""
        started = time.monotonic_ns()
        deadline, most_reserve = None, 0
        if budget.seconds is not None:
            deadline = started + int(budget.seconds * 1e9)
            most_reserve = int(MOST_RESERVE_SHARE * budget.seconds * 1e9)
        known_pause = int(budget.pause_seconds * 1e9)
        limits = limits_until(deadline, budget.max_evaluations, most_reserve, known_pause)
        assignment = np.full(problem.n_requests, UNASSIGNED, dtype=np.int64)
        costs, _, rows, seeds = scalarise(problem)
        if not rows.size:
            return Decision(assignment, lower_bound=0.0)
        found, _, bound = search(costs, seeds, random_state(rng), limits)
        pause = 0
        if deadline is not None:
            last_look, longest = (int(value) for value in limits.pauses)
            met = longest if longest > known_pause else 0
            pause = max(met, time.monotonic_ns() - last_look)
        assignment[rows] = found
        return Decision(assignment, bound, int(limits.evaluations[0]), pause_seconds=pause * 1e-9)
