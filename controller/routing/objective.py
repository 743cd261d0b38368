"""Weights, normalisation and the scalar objective J.

J(x) = sum over the terms of weight * (term - lo) / (hi - lo); a term with hi = lo counts 0.
Never clipped here: a report may clip, a search must not. Raw terms stay available beside J.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controller.routing.compiled import compiled, compiled_part, random_index, stable_order
from controller.routing.node_loads import (
    Costs,
    NodeLoads,
    add,
    clear,
    finish_joined,
    last_finish,
    no_loads,
    own_finish,
)
from controller.routing.problem import (
    BoolArray,
    FloatArray,
    IntArray,
    Normalisation,
    RoutingProblem,
)

RANDOM_SAMPLE: Final = 200
"""Random legal assignments that the `random` normalisation looks at."""

RANDOM_SEED: Final = 20260902
"""Start of their generator: the same problem has the same bounds everywhere."""

_SAME: Final = 1e-12
"""Relative width under which hi and lo are one value that was summed in two orders."""

_CODE: Final = {Normalisation.PAYOFF: 0, Normalisation.RANDOM: 1, Normalisation.MINMAX: 2}


class Scalarised(NamedTuple):
    """What a search works on.

    Attributes:
        costs: the weighed problem over the routable requests.
        bounds: float64[4, 2]; lo and hi of the four terms.
        requests: int64; the problem's row of each row of `costs`.
        seeds: int64[4, rows]; best quality, cheapest, least energy and earliest finish.
    """

    costs: Costs
    bounds: FloatArray
    requests: IntArray
    seeds: IntArray


def bounds_of(problem: RoutingProblem) -> FloatArray:
    """Range of the four terms, lo and hi, float64[4, 2].

    The problem's own when it has them, else by its normalisation, over the routable requests:

    - `payoff` (ours): four assignments, one a term, each request at the least value of the term,
      ties and the order of the batch by `_single_term_seeds`; lo and hi are the least and
      the greatest value among the four. For T, lo is at most max over r of min over d of
      backlog + latency + network. An assignment is left out when its term is the same for every
      feasible pair: it would say nothing about that term and stretch the others.
    - `random`: lo as `minmax`; hi the greatest among 200 random legal assignments, fixed seed.
    - `minmax`: lo and hi the sums of each request's least and greatest entry; for T, lo as above,
      hi the greatest completion of a node that got every request that may go to it, each at the
      slowest model there.

    Source: routing specification, section 2.
    """
    return scalarise(problem).bounds


def objectives(problem: RoutingProblem, terms: FloatArray, bounds: FloatArray) -> FloatArray:
    """J of many assignments.

    Args:
        problem: its weights count.
        terms: float64[P, 4], from `evaluate`.
        bounds: float64[4, 2], from `bounds_of`.

    Returns:
        float64[P].
    """
    return np.asarray(normalised(terms, bounds) @ problem.weights)


def normalised(terms: FloatArray, bounds: FloatArray) -> FloatArray:
    """(term - lo) / (hi - lo), 0 where hi = lo; float64[P, 4], not clipped."""
    low, width = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
    counts = width > 0.0
    return np.where(counts, (terms - low) / np.where(counts, width, 1.0), 0.0)


def scalarise(problem: RoutingProblem) -> Scalarised:
    """Weigh the problem for a search.

    One compiled call: NumPy would give the GIL away a few dozen times, and under load each time
    costs as much as a whole search.
    """
    return Scalarised(
        *_scalarise(
            problem.quality,
            problem.cost_usd,
            problem.energy_joules,
            problem.work_seconds,
            problem.latency_seconds,
            problem.network_seconds,
            problem.node_of,
            problem.backlog_seconds,
            problem.feasible,
            problem.weights,
            _CODE[problem.normalisation],
            problem.bounds is not None,
            problem.bounds if problem.bounds is not None else np.zeros((4, 2)),
        )
    )


@compiled
def _scalarise(
    quality: FloatArray,
    money: FloatArray,
    energy: FloatArray,
    work: FloatArray,
    latency: FloatArray,
    network: FloatArray,
    node_of: IntArray,
    backlog: FloatArray,
    feasible: BoolArray,
    weights: FloatArray,
    normalisation: int,
    has_bounds: bool,
    given_bounds: FloatArray,
) -> tuple[Costs, FloatArray, IntArray, IntArray]:
    n_destinations = quality.shape[1]
    n_rows = 0
    for r in range(quality.shape[0]):
        for d in range(n_destinations):
            if feasible[r, d]:
                n_rows += 1
                break
    requests = np.empty(n_rows, dtype=np.int64)
    terms = np.empty((3, n_rows, n_destinations))
    shape = (n_rows, n_destinations)
    # Until the terms are weighed, a cost says only whether a pair is allowed.
    unweighed = Costs(
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        node_of,
        backlog,
        0.0,
        0.0,
    )
    i = 0
    for r in range(quality.shape[0]):
        if not feasible[r].any():
            continue
        requests[i] = r
        for d in range(n_destinations):
            terms[0, i, d] = 1.0 - quality[r, d]
            terms[1, i, d] = money[r, d]
            terms[2, i, d] = energy[r, d]
            unweighed.cost[i, d] = 0.0 if feasible[r, d] else np.inf
            unweighed.work[i, d] = work[r, d]
            unweighed.latency[i, d] = latency[r, d]
            unweighed.network[i, d] = network[r, d]
        i += 1

    seeds = _single_term_seeds(terms, unweighed)
    if has_bounds:
        bounds = given_bounds.copy()
    elif n_rows == 0:
        bounds = np.zeros((4, 2))
    else:
        bounds = _bounds(normalisation, seeds, terms, unweighed)

    factors = np.zeros(4)
    constant = 0.0
    for k in range(4):
        if bounds[k, 1] > bounds[k, 0]:
            factors[k] = weights[k] / (bounds[k, 1] - bounds[k, 0])
            constant -= factors[k] * bounds[k, 0]
    cost = unweighed.cost
    for i in range(n_rows):
        for d in range(n_destinations):
            if cost[i, d] < np.inf:
                cost[i, d] = (
                    factors[0] * terms[0, i, d]
                    + factors[1] * terms[1, i, d]
                    + factors[2] * terms[2, i, d]
                )
    weighed = Costs(
        cost,
        unweighed.work,
        unweighed.latency,
        unweighed.network,
        node_of,
        backlog,
        factors[3],
        constant,
    )
    return weighed, bounds, requests, seeds


@compiled_part
def _single_term_seeds(terms: FloatArray, costs: Costs) -> IntArray:
    """int64[4, R]: best quality, cheapest, least energy, earliest finish.

    Requests are placed one by one, those of greatest mean latency over their feasible
    destinations first. Each goes to its least value of the term; among equals, and for the
    earliest finish among all, to where the node's completion after taking it is soonest.

    Args:
        terms: float64[3, R, D]; quality lost, money, joules.
        costs: the problem, weighed or not.
    """
    n_requests, n_destinations = costs.cost.shape
    length = np.zeros(n_requests)
    for r in range(n_requests):
        count = 0
        for d in range(n_destinations):
            if costs.cost[r, d] < np.inf:
                length[r] -= costs.latency[r, d]
                count += 1
        length[r] /= count
    order = stable_order(length)
    seeds = np.empty((4, n_requests), dtype=np.int64)
    loads = no_loads(costs.backlog.size)
    for k in range(4):
        clear(loads)
        for r in order:
            least = np.inf
            soonest = np.inf
            best = -1
            for d in range(n_destinations):
                if costs.cost[r, d] == np.inf:
                    continue
                value = terms[k, r, d] if k < 3 else 0.0
                if value > least:
                    continue
                n = costs.node_of[d]
                finish = finish_joined(
                    costs, loads.work[n], loads.latency[n], loads.network[n], r, d
                )
                if value < least or finish < soonest:
                    least, soonest, best = value, finish, d
            seeds[k, r] = best
            add(costs, loads, r, best)
    return seeds


@compiled_part
def _terms_of(x: IntArray, terms: FloatArray, costs: Costs, loads: NodeLoads) -> FloatArray:
    """float64[4] of an assignment, int64[R]; `loads` is scratch."""
    values = np.zeros(4)
    clear(loads)
    for r in range(x.size):
        for k in range(3):
            values[k] += terms[k, r, x[r]]
        add(costs, loads, r, x[r])
    values[3] = last_finish(costs, loads)
    return values


@compiled_part
def _bounds(normalisation: int, seeds: IntArray, terms: FloatArray, costs: Costs) -> FloatArray:
    n_requests, n_destinations = costs.cost.shape
    soonest = 0.0
    for r in range(n_requests):
        best = np.inf
        for d in range(n_destinations):
            if costs.cost[r, d] < np.inf:
                waiting = costs.backlog[costs.node_of[d]]
                best = min(best, own_finish(waiting, costs.latency[r, d], costs.network[r, d]))
        soonest = max(soonest, best)

    bounds = np.zeros((4, 2))
    if normalisation == 0:
        loads = no_loads(costs.backlog.size)
        bounds[:, 0] = np.inf
        bounds[:, 1] = -np.inf
        for k in range(4):
            if k < 3 and _is_constant(terms[k], costs):
                continue
            values = _terms_of(seeds[k], terms, costs, loads)
            for j in range(4):
                bounds[j, 0] = min(bounds[j, 0], values[j])
                bounds[j, 1] = max(bounds[j, 1], values[j])
        bounds[3, 0] = min(bounds[3, 0], soonest)
    else:
        for r in range(n_requests):
            for k in range(3):
                low = np.inf
                high = -np.inf
                for d in range(n_destinations):
                    if costs.cost[r, d] < np.inf:
                        low = min(low, terms[k, r, d])
                        high = max(high, terms[k, r, d])
                bounds[k, 0] += low
                bounds[k, 1] += high
        bounds[3, 0] = soonest
        if normalisation == 1:
            bounds[:, 1] = -np.inf
            _widen_by_random(bounds, terms, costs)
        else:
            bounds[3, 1] = _everything_on_one_node(costs)
    for k in range(4):
        scale = max(abs(bounds[k, 0]), abs(bounds[k, 1]))
        if bounds[k, 1] - bounds[k, 0] <= _SAME * scale:
            bounds[k, 1] = bounds[k, 0]
    return bounds


@compiled_part
def _is_constant(values: FloatArray, costs: Costs) -> bool:
    low = np.inf
    high = -np.inf
    for r in range(values.shape[0]):
        for d in range(values.shape[1]):
            if costs.cost[r, d] < np.inf:
                low = min(low, values[r, d])
                high = max(high, values[r, d])
    return high <= low


@compiled_part
def _widen_by_random(bounds: FloatArray, terms: FloatArray, costs: Costs) -> None:
    state = np.empty(1, dtype=np.uint64)
    state[0] = np.uint64(RANDOM_SEED)
    legal, counts = legal_destinations(costs)
    loads = no_loads(costs.backlog.size)
    x = np.empty(counts.size, dtype=np.int64)
    for _ in range(RANDOM_SAMPLE):
        random_legal(legal, counts, state, x)
        values = _terms_of(x, terms, costs, loads)
        for k in range(4):
            bounds[k, 1] = max(bounds[k, 1], values[k])


@compiled_part
def legal_destinations(costs: Costs) -> tuple[IntArray, IntArray]:
    """Each request's feasible destinations in order of index, and how many there are.

    Returns:
        int64[R, D], of which the first counts[r] of row r count, and int64[R].
    """
    n_requests, n_destinations = costs.cost.shape
    legal = np.zeros((n_requests, n_destinations), dtype=np.int64)
    counts = np.zeros(n_requests, dtype=np.int64)
    for r in range(n_requests):
        for d in range(n_destinations):
            if costs.cost[r, d] < np.inf:
                legal[r, counts[r]] = d
                counts[r] += 1
    return legal, counts


@compiled_part
def random_legal(legal: IntArray, counts: IntArray, state: NDArray[np.uint64], x: IntArray) -> None:
    """Fill `x` with uniformly drawn feasible destinations."""
    for r in range(x.size):
        x[r] = legal[r, random_index(state, counts[r])]


@compiled_part
def _everything_on_one_node(costs: Costs) -> Any:
    """float64, seconds: the greatest finish of a node that gets every request that may go there.

    Each at the node's slowest destination for it.
    """
    n_requests, n_destinations = costs.cost.shape
    loads = no_loads(costs.backlog.size)
    heaviest = np.empty(costs.backlog.size)
    for r in range(n_requests):
        heaviest[:] = 0.0
        for d in range(n_destinations):
            if costs.cost[r, d] < np.inf:
                n = costs.node_of[d]
                loads.is_used[n] = True
                heaviest[n] = max(heaviest[n], costs.work[r, d])
                loads.latency[n] = max(loads.latency[n], costs.latency[r, d])
                loads.network[n] = max(loads.network[n], costs.network[r, d])
        for n in range(heaviest.size):
            loads.work[n] += heaviest[n]
    return last_finish(costs, loads)
