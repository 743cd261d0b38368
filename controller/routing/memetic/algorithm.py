"""The search that serves: anytime, memetic, with makespan descent as its local search."""

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controller.routing.compiled import (
    Limits,
    compiled,
    compiled_without_gil,
    exhausted,
    limits_until,
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
from controller.routing.memetic.local_search import by_cost, improve, shed
from controller.routing.objective import Costs, scalarise
from controller.routing.policy import UNASSIGNED, Budget, Decision
from controller.routing.problem import FloatArray, IntArray, RoutingProblem

COARSE_STEP: Final = 0.85
"""Factor by which the cap falls while the region of the best makespan is sought."""

FINE_STEP: Final = 0.97
"""Factor by which it falls within that region."""

FINE_SPAN: Final = 0.12
"""How far around the best makespan the fine steps reach."""

STALL_KICKS_PER_REQUEST: Final = 400
"""Kicks without improvement, per request, after which the search is over."""


@compiled
def _keep_better(costs: Costs, loads: Loads, best: IntArray, best_j: FloatArray) -> bool:
    j = separable_cost(costs, loads.x) + costs.time_weight * makespan(costs, loads)
    if j < best_j[0] - 1e-13:
        best_j[0] = j
        best[:] = loads.x
        return True
    return False


@compiled
def descend(
    costs: Costs,
    loads: Loads,
    order: IntArray,
    counts: IntArray,
    best: IntArray,
    best_j: FloatArray,
    limits: Limits,
) -> None:
    """Lower the cap from where every request is at its cheapest; keep the best seen."""
    n_requests = loads.x.size
    for r in range(n_requests):
        loads.x[r] = order[r, 0]
    start = loads.x.copy()
    load_assignment(costs, loads, start)
    _keep_better(costs, loads, best, best_j)
    cap = makespan(costs, loads)
    above = start.copy()
    previous = start.copy()
    best_cap = cap
    while not exhausted(limits):
        cap *= COARSE_STEP
        previous[:] = loads.x
        if not shed(costs, loads, order, counts, cap, limits):
            break
        improve(costs, loads, order, counts, cap, False, limits)
        if _keep_better(costs, loads, best, best_j):
            above[:] = previous
            best_cap = makespan(costs, loads)
        if separable_cost(costs, loads.x) >= best_j[0]:
            break
        cap = min(cap, makespan(costs, loads))
    load_assignment(costs, loads, above)
    cap = min(makespan(costs, loads), best_cap * (1.0 + FINE_SPAN)) / FINE_STEP
    lowest = best_cap * (1.0 - FINE_SPAN)
    while cap * FINE_STEP > lowest and not exhausted(limits):
        cap *= FINE_STEP
        if not shed(costs, loads, order, counts, cap, limits):
            break
        improve(costs, loads, order, counts, cap, True, limits)
        _keep_better(costs, loads, best, best_j)
        cap = min(cap, makespan(costs, loads))


@compiled_without_gil
def search(
    costs: Costs, seeds: IntArray, state: NDArray[np.uint64], limits: Limits
) -> tuple[IntArray, float]:
    """The best assignment found, int64[R], and its J."""
    n_requests = costs.cost.shape[0]
    order, counts = by_cost(costs.cost)
    loads = empty_loads(n_requests, costs.backlog.size)
    best = seeds[0].copy()
    best_j = np.full(1, np.inf)
    for k in range(seeds.shape[0]):
        load_assignment(costs, loads, seeds[k])
        limits.evaluations[0] += 1
        _keep_better(costs, loads, best, best_j)
    descend(costs, loads, order, counts, best, best_j, limits)

    stalled = 0
    while stalled < STALL_KICKS_PER_REQUEST * n_requests and not exhausted(limits):
        load_assignment(costs, loads, best)
        cap = makespan(costs, loads) * (0.94 + 0.10 * random_unit(state))
        kicks = 2 + random_index(state, max(2, n_requests // 8))
        for _ in range(kicks):
            r = random_index(state, n_requests)
            move(costs, loads, r, order[r, random_index(state, counts[r])])
        stalled += 1
        limits.evaluations[0] += 1
        if not shed(costs, loads, order, counts, cap, limits):
            continue
        improve(costs, loads, order, counts, cap, True, limits)
        if _keep_better(costs, loads, best, best_j):
            stalled = 0
    return best, best_j[0] + costs.constant


@dataclass(frozen=True, slots=True)
class MemeticPolicy:
    """Joint assignment of the batch by makespan descent and memetic search."""

    name: str = "memetic"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """The best assignment found until the budget ends or nothing improves any more."""
        started = time.monotonic_ns()
        deadline = None if budget.seconds is None else started + int(budget.seconds * 1e9)
        limits = limits_until(deadline, budget.max_evaluations)
        assignment = np.full(problem.n_requests, UNASSIGNED, dtype=np.int64)
        scalarised = scalarise(problem)
        if scalarised.requests.size:
            found, _ = search(scalarised.costs, scalarised.seeds, random_state(rng), limits)
            assignment[scalarised.requests] = found
        return Decision(assignment, evaluations=int(limits.evaluations[0]))
