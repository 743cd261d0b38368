"""Sending requests one after another, each by a rule over its feasible destinations."""

from collections.abc import Callable
from typing import Final

import numpy as np

from controller.routing.policy import UNASSIGNED, Decision
from controller.routing.problem import FloatArray, IntArray, RoutingProblem

SAME: Final = 1e-12
"""Values nearer than this are ties."""


def send_each(
    problem: RoutingProblem, choose: Callable[[int, IntArray, FloatArray], int]
) -> Decision:
    """Apply a rule to every request in batch order.

    Args:
        problem: the arrays.
        choose: called with the request's index, its feasible destinations in order of index,
            int64[at least 1], and each node's backlog with the work already sent to it by this
            batch, float64[N] seconds; returns one of the destinations.
    """
    assignment = np.full(problem.n_requests, UNASSIGNED, dtype=np.int64)
    backlog = problem.backlog_seconds.copy()
    scored = 0
    for r in range(problem.n_requests):
        feasible = np.flatnonzero(problem.feasible[r])
        if not feasible.size:
            continue
        scored += int(feasible.size)
        chosen = choose(r, feasible, backlog)
        assignment[r] = chosen
        backlog[problem.node_of[chosen]] += problem.work_seconds[r, chosen]
    return Decision(assignment, evaluations=scored)


def first_least(destinations: IntArray, values: FloatArray) -> int:
    """The first of the destinations whose value is the least."""
    return int(destinations[np.argmin(values)])


def ties(destinations: IntArray, values: FloatArray) -> IntArray:
    """The destinations whose value is the least, up to rounding."""
    return np.asarray(destinations[values <= values.min() + SAME])


def least_loaded(
    problem: RoutingProblem, r: int, destinations: IntArray, backlog: FloatArray
) -> int:
    """Of the destinations, the one whose node has the least backlog.

    Among those of equally loaded nodes, where the request takes the least work; then the first.
    """
    waiting = backlog[problem.node_of[destinations]]
    work = problem.work_seconds[r, destinations]
    return int(destinations[np.lexsort((destinations, work, waiting))[0]])


def class_quality(problem: RoutingProblem) -> FloatArray:
    """Quality of each request's class, float64[R, D]; the predicted quality when not given."""
    given = problem.metadata.class_quality
    return problem.quality if given is None else given
