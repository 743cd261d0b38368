"""Weights, normalisation and the scalar objective J.

J(x) = sum over the terms of weight * (term - lo) / (hi - lo); a term with hi = lo counts 0.
Never clipped here: a report may clip, a search must not. Raw terms stay available beside J.
"""

from typing import Final, NamedTuple

import numpy as np

from controller.routing.compiled import compiled, compiled_part, random_index, stable_order
from controller.routing.policy import UNASSIGNED
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
      ties and the order of the batch by `single_term_assignments`; lo and hi are the least and
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
    costs, bounds, requests, seeds = _scalarise(
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
    return Scalarised(Costs(*costs), bounds, requests, seeds)


def single_term_assignments(problem: RoutingProblem) -> IntArray:
    """int64[4, R]: best quality, cheapest, least energy, earliest finish; -1 for nowhere.

    Requests are placed one by one, those of greatest mean latency over their feasible
    destinations first. Each goes to its least value of the term; among equals, and for the
    earliest finish among all, to where the node's completion after taking it is soonest.
    """
    scalarised = scalarise(problem)
    whole = np.full((4, problem.n_requests), UNASSIGNED, dtype=np.int64)
    whole[:, scalarised.requests] = scalarised.seeds
    return whole


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
) -> tuple[
    tuple[FloatArray, FloatArray, FloatArray, FloatArray, IntArray, FloatArray, float, float],
    FloatArray,
    IntArray,
    IntArray,
]:
    n_destinations = quality.shape[1]
    n_rows = 0
    for r in range(quality.shape[0]):
        for d in range(n_destinations):
            if feasible[r, d]:
                n_rows += 1
                break
    requests = np.empty(n_rows, dtype=np.int64)
    terms = np.empty((3, n_rows, n_destinations))
    allowed = np.empty((n_rows, n_destinations), dtype=np.bool_)
    rows_work = np.empty((n_rows, n_destinations))
    rows_latency = np.empty((n_rows, n_destinations))
    rows_network = np.empty((n_rows, n_destinations))
    i = 0
    for r in range(quality.shape[0]):
        if not feasible[r].any():
            continue
        requests[i] = r
        for d in range(n_destinations):
            allowed[i, d] = feasible[r, d]
            terms[0, i, d] = 1.0 - quality[r, d]
            terms[1, i, d] = money[r, d]
            terms[2, i, d] = energy[r, d]
            rows_work[i, d] = work[r, d]
            rows_latency[i, d] = latency[r, d]
            rows_network[i, d] = network[r, d]
        i += 1

    seeds = _single_term_seeds(
        terms, allowed, rows_work, rows_latency, rows_network, node_of, backlog
    )
    if has_bounds:
        bounds = given_bounds.copy()
    elif n_rows == 0:
        bounds = np.zeros((4, 2))
    else:
        bounds = _bounds(
            normalisation,
            seeds,
            terms,
            allowed,
            rows_work,
            rows_latency,
            rows_network,
            node_of,
            backlog,
        )

    factors = np.zeros(4)
    constant = 0.0
    for k in range(4):
        if bounds[k, 1] > bounds[k, 0]:
            factors[k] = weights[k] / (bounds[k, 1] - bounds[k, 0])
            constant -= factors[k] * bounds[k, 0]
    cost = np.empty((n_rows, n_destinations))
    for i in range(n_rows):
        for d in range(n_destinations):
            if allowed[i, d]:
                cost[i, d] = (
                    factors[0] * terms[0, i, d]
                    + factors[1] * terms[1, i, d]
                    + factors[2] * terms[2, i, d]
                )
            else:
                cost[i, d] = np.inf
    packed = (
        cost,
        rows_work,
        rows_latency,
        rows_network,
        node_of,
        backlog,
        factors[3],
        constant,
    )
    return packed, bounds, requests, seeds


@compiled_part
def _single_term_seeds(
    terms: FloatArray,
    allowed: BoolArray,
    work: FloatArray,
    latency: FloatArray,
    network: FloatArray,
    node_of: IntArray,
    backlog: FloatArray,
) -> IntArray:
    n_requests, n_destinations = allowed.shape
    n_nodes = backlog.size
    length = np.zeros(n_requests)
    for r in range(n_requests):
        count = 0
        for d in range(n_destinations):
            if allowed[r, d]:
                length[r] -= latency[r, d]
                count += 1
        length[r] /= count
    order = stable_order(length)
    seeds = np.empty((4, n_requests), dtype=np.int64)
    for k in range(4):
        load = np.zeros(n_nodes)
        longest = np.zeros(n_nodes)
        slowest_link = np.zeros(n_nodes)
        for r in order:
            least = np.inf
            soonest = np.inf
            best = -1
            for d in range(n_destinations):
                if not allowed[r, d]:
                    continue
                value = terms[k, r, d] if k < 3 else 0.0
                if value > least:
                    continue
                n = node_of[d]
                finish = (
                    backlog[n]
                    + max(load[n] + work[r, d], max(longest[n], latency[r, d]))
                    + max(slowest_link[n], network[r, d])
                )
                if value < least or finish < soonest:
                    least, soonest, best = value, finish, d
            seeds[k, r] = best
            n = node_of[best]
            load[n] += work[r, best]
            longest[n] = max(longest[n], latency[r, best])
            slowest_link[n] = max(slowest_link[n], network[r, best])
    return seeds


@compiled_part
def _terms_of(
    x: IntArray,
    terms: FloatArray,
    work: FloatArray,
    latency: FloatArray,
    network: FloatArray,
    node_of: IntArray,
    backlog: FloatArray,
) -> FloatArray:
    n_nodes = backlog.size
    values = np.zeros(4)
    load = np.zeros(n_nodes)
    longest = np.zeros(n_nodes)
    slowest_link = np.zeros(n_nodes)
    used = np.zeros(n_nodes, dtype=np.bool_)
    for r in range(x.size):
        d = x[r]
        for k in range(3):
            values[k] += terms[k, r, d]
        n = node_of[d]
        used[n] = True
        load[n] += work[r, d]
        longest[n] = max(longest[n], latency[r, d])
        slowest_link[n] = max(slowest_link[n], network[r, d])
    for n in range(n_nodes):
        if used[n]:
            finish = backlog[n] + max(load[n], longest[n]) + slowest_link[n]
            values[3] = max(values[3], finish)
    return values


@compiled_part
def _bounds(
    normalisation: int,
    seeds: IntArray,
    terms: FloatArray,
    allowed: BoolArray,
    work: FloatArray,
    latency: FloatArray,
    network: FloatArray,
    node_of: IntArray,
    backlog: FloatArray,
) -> FloatArray:
    n_requests, n_destinations = allowed.shape
    soonest = 0.0
    for r in range(n_requests):
        best = np.inf
        for d in range(n_destinations):
            if allowed[r, d]:
                best = min(best, backlog[node_of[d]] + latency[r, d] + network[r, d])
        soonest = max(soonest, best)

    bounds = np.zeros((4, 2))
    if normalisation == 0:
        bounds[:, 0] = np.inf
        bounds[:, 1] = -np.inf
        for k in range(4):
            if k < 3 and _is_constant(terms[k], allowed):
                continue
            values = _terms_of(seeds[k], terms, work, latency, network, node_of, backlog)
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
                    if allowed[r, d]:
                        low = min(low, terms[k, r, d])
                        high = max(high, terms[k, r, d])
                bounds[k, 0] += low
                bounds[k, 1] += high
        bounds[3, 0] = soonest
        if normalisation == 1:
            bounds[:, 1] = -np.inf
            _widen_by_random(bounds, terms, allowed, work, latency, network, node_of, backlog)
        else:
            bounds[3, 1] = _everything_on_one_node(
                allowed, work, latency, network, node_of, backlog
            )
    for k in range(4):
        scale = max(abs(bounds[k, 0]), abs(bounds[k, 1]))
        if bounds[k, 1] - bounds[k, 0] <= _SAME * scale:
            bounds[k, 1] = bounds[k, 0]
    return bounds


@compiled_part
def _is_constant(values: FloatArray, allowed: BoolArray) -> bool:
    low = np.inf
    high = -np.inf
    for r in range(values.shape[0]):
        for d in range(values.shape[1]):
            if allowed[r, d]:
                low = min(low, values[r, d])
                high = max(high, values[r, d])
    return high <= low


@compiled_part
def _widen_by_random(
    bounds: FloatArray,
    terms: FloatArray,
    allowed: BoolArray,
    work: FloatArray,
    latency: FloatArray,
    network: FloatArray,
    node_of: IntArray,
    backlog: FloatArray,
) -> None:
    n_requests, n_destinations = allowed.shape
    state = np.empty(1, dtype=np.uint64)
    state[0] = np.uint64(RANDOM_SEED)
    legal = np.empty((n_requests, n_destinations), dtype=np.int64)
    counts = np.zeros(n_requests, dtype=np.int64)
    for r in range(n_requests):
        for d in range(n_destinations):
            if allowed[r, d]:
                legal[r, counts[r]] = d
                counts[r] += 1
    x = np.empty(n_requests, dtype=np.int64)
    for _ in range(RANDOM_SAMPLE):
        for r in range(n_requests):
            x[r] = legal[r, random_index(state, counts[r])]
        values = _terms_of(x, terms, work, latency, network, node_of, backlog)
        for k in range(4):
            bounds[k, 1] = max(bounds[k, 1], values[k])


@compiled_part
def _everything_on_one_node(
    allowed: BoolArray,
    work: FloatArray,
    latency: FloatArray,
    network: FloatArray,
    node_of: IntArray,
    backlog: FloatArray,
) -> float:
    n_requests, n_destinations = allowed.shape
    n_nodes = backlog.size
    load = np.zeros(n_nodes)
    longest = np.zeros(n_nodes)
    slowest_link = np.zeros(n_nodes)
    heaviest = np.empty(n_nodes)
    used = np.zeros(n_nodes, dtype=np.bool_)
    for r in range(n_requests):
        heaviest[:] = 0.0
        for d in range(n_destinations):
            if allowed[r, d]:
                n = node_of[d]
                used[n] = True
                heaviest[n] = max(heaviest[n], work[r, d])
                longest[n] = max(longest[n], latency[r, d])
                slowest_link[n] = max(slowest_link[n], network[r, d])
        load += heaviest
    latest = 0.0
    for n in range(n_nodes):
        if used[n]:
            latest = max(latest, backlog[n] + max(load[n], longest[n]) + slowest_link[n])
    return latest
