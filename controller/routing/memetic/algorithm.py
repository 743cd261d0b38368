"""The search that serves: anytime, memetic, with makespan descent as its local search.

1. The four single-term assignments and a descent of the makespan's cap seed the elite.
2. Lower bounds by makespan interval (`controller.routing.bounds`) show which pairs no better
   assignment can contain; the search does not look at them again.
3. Offspring of the elite, by kicks or crossover, are repaired under a drawn cap and made local
   optima (Lamarckian: the improved assignment is what enters the elite), the cap following the
   makespan down for as long as J falls.

Steps 2 and 3 happen twice, the second time with the better J that the first has found.
"""

import time
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controller.routing.bounds import (
    ROUNDING,
    candidate_pairs,
    least_bound,
    open_intervals,
    survivors,
    thin,
    tighten,
)
from controller.routing.compiled import (
    Limits,
    compiled,
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
from controller.routing.memetic.local_search import Neighbourhood, improve, new_search, shed
from controller.routing.objective import Costs, scalarise
from controller.routing.policy import UNASSIGNED, Budget, Decision
from controller.routing.problem import BoolArray, FloatArray, IntArray, RoutingProblem

ELITE: Final = 12
"""Assignments in the elite."""

NICHE: Final = 0.01
"""Of assignments whose makespans differ relatively by less, only the best stays."""

COARSE_STEP: Final = 0.85
"""Factor by which the cap falls in the first descent."""

FINE_STEP: Final = 0.97
"""Factor by which it falls around the best makespan."""

FINE_SPAN: Final = 0.12
"""How far around the best makespan the fine steps reach, relatively."""

CROSSOVER_SHARE: Final = 0.3
"""Offspring with two parents; the others are kicked copies of one."""

MOST_KICKS_SHARE: Final = 1.0 / 16.0
"""Most requests that a kick sends elsewhere, as a share of the batch; 3 are always allowed."""

NARROW: Final = 0.03
"""Usual relative distance of an offspring's cap from its mother's makespan, either way."""

WIDE: Final = 0.3
"""The same for a few offspring, which look for quite another makespan."""

NARROW_SHARE: Final = 0.8
"""Offspring with a narrow distance."""

TIGHTEN: Final = 0.003
"""Relative step of the cap below the makespan reached, while J falls."""

PROMISING: Final = 0.02
"""Relative distance from the best J within which the cap is lowered at all."""

STALL_PER_REQUEST: Final = 300
"""Offspring without a new best, per request of the batch, after which the search is over."""

ROUNDS: Final = ((0.1, 0.1, 0.5), (0.1, 0.1, 1.0))
"""Shares of what is left of the budget: twice for the bound, the second time over fewer pairs, then
for offspring."""


RESERVE_SHARE: Final = 0.05
"""Share of a time budget kept for the way back: the answer is wanted by its end, and on a busy
machine the thread waits for a core and for the GIL."""

MOST_RESERVE_SECONDS: Final = 0.001
"""Most that is kept."""


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


@compiled
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


@compiled
def _descend(
    costs: Costs, loads: Loads, around: Neighbourhood, elite: Elite, limits: Limits
) -> None:
    """Lower the cap from where every request is at its cheapest.

    Coarsely at first, until the separable cost alone is no better than the best J; then finely
    around the best makespan.
    """
    start = around.order[:, 0].copy()
    load_assignment(costs, loads, start)
    _join(costs, loads, elite)
    cap = makespan(costs, loads)
    while not exhausted(limits):
        cap *= COARSE_STEP
        if not shed(costs, loads, around, cap, limits):
            break
        improve(costs, loads, around, cap, limits)
        _join(costs, loads, elite)
        if separable_cost(costs, loads.x) >= elite.scores[0]:
            break
        cap = min(cap, makespan(costs, loads))

    lowest = elite.spans[0] * (1.0 - FINE_SPAN)
    cap = elite.spans[0] * (1.0 + FINE_SPAN)
    above = 0
    for i in range(1, elite.filled[0]):
        nearer = elite.spans[i] < elite.spans[above] or elite.spans[above] < cap
        if elite.spans[i] >= cap and nearer:
            above = i
    load_assignment(costs, loads, elite.x[above])
    while cap > lowest and not exhausted(limits):
        if not shed(costs, loads, around, cap, limits):
            break
        improve(costs, loads, around, cap, limits)
        _join(costs, loads, elite)
        cap = min(cap, makespan(costs, loads)) * FINE_STEP


@compiled
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
    prefer cheap destinations, with a density that falls like the inverse root of the rank.
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
        u = random_unit(state)
        move(costs, loads, r, around.order[r, np.int64(u * u * around.counts[r])])


@compiled
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
        reached = np.inf
        while shed(costs, loads, around, cap, limits):
            improve(costs, loads, around, cap, limits)
            j = _join(costs, loads, elite)
            if j >= reached - 1e-12 or j > best + PROMISING * abs(best) or exhausted(limits):
                break
            reached = j
            cap = makespan(costs, loads) * (1.0 - TIGHTEN)
        stalled = 0 if elite.scores[0] < best - 1e-12 else stalled + 1


@compiled
def _leave_only(around: Neighbourhood, kept: BoolArray) -> None:
    """Take all but the kept pairs, bool[R, D], out of the lists that moves are drawn from."""
    for r in range(around.counts.size):
        k = 0
        for i in range(around.counts[r]):
            if kept[r, around.order[r, i]]:
                around.order[r, k] = around.order[r, i]
                k += 1
        if k > 0:  # none is left only where rounding took the best known assignment's own
            around.counts[r] = k


@compiled
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
    return Limits(limits.clock, limits.clock_id, deadline, evaluations, limits.evaluations)


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
    pairs = candidate_pairs(costs, best)
    for first_share, second_share, offspring_share in ROUNDS:
        for share in (first_share, second_share):
            tighten(costs, pairs, intervals, best, _share_of(limits, share))
            survivors(costs, pairs, intervals, best, kept)
            thin(pairs, kept)
        if least_bound(intervals, best) >= best:
            break
        _leave_only(around, kept)
        _evolve(costs, loads, around, elite, state, _share_of(limits, offspring_share))
        best = elite.scores[0] + costs.constant
    return elite.x[0].copy(), best, least_bound(intervals, best) - ROUNDING


@dataclass(frozen=True, slots=True)
class MemeticPolicy:
    """Joint assignment of the batch by makespan descent and memetic search."""

    name: str = "memetic"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """The best assignment found until the budget ends or nothing improves any more."""
        started = time.monotonic_ns()
        deadline = None
        if budget.seconds is not None:
            reserve = min(RESERVE_SHARE * budget.seconds, MOST_RESERVE_SECONDS)
            deadline = started + int((budget.seconds - reserve) * 1e9)
        limits = limits_until(deadline, budget.max_evaluations)
        assignment = np.full(problem.n_requests, UNASSIGNED, dtype=np.int64)
        costs, _, rows, seeds = scalarise(problem)
        if not rows.size:
            return Decision(assignment, lower_bound=0.0)
        found, _, bound = search(costs, seeds, random_state(rng), limits)
        assignment[rows] = found
        return Decision(assignment, bound, int(limits.evaluations[0]))
