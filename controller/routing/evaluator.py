"""The batch evaluator: raw terms of complete assignments, whole populations at once."""

from dataclasses import dataclass

import numpy as np

from controller.routing.completion import checked_assignments, node_completion_seconds
from controller.routing.policy import UNASSIGNED
from controller.routing.problem import FloatArray, IntArray, RoutingProblem


@dataclass(frozen=True, slots=True)
class Terms:
    """Raw terms of one assignment; requests sent nowhere count in none of them.

    Attributes:
        quality_loss: Q, sum of 1 - quality.
        cost_usd: C.
        energy_joules: E.
        completion_seconds: T, when the last node has answered its share.
    """

    quality_loss: float
    cost_usd: float
    energy_joules: float
    completion_seconds: float


def evaluate(problem: RoutingProblem, assignments: IntArray) -> FloatArray:
    """Score many assignments.

    Args:
        problem: the arrays.
        assignments: int64[P, R]; destination index, or -1 for a request sent nowhere. Whether a
            pair is feasible is not asked.

    Returns:
        float64[P, 4]: Q, C, E, T of each.

    Raises:
        ValueError: an assignment names no destination.

    Source: routing specification, section 2; CEMA III-C.
    """
    chosen = checked_assignments(problem, assignments)
    sent = chosen != UNASSIGNED
    rows = np.arange(problem.n_requests)

    def total(values: FloatArray) -> FloatArray:
        return np.asarray(np.where(sent, values[rows, chosen], 0.0).sum(axis=1))

    completion = node_completion_seconds(problem, chosen)
    return np.stack(
        [
            total(1.0 - problem.quality),
            total(problem.cost_usd),
            total(problem.energy_joules),
            completion.max(axis=1),
        ],
        axis=1,
    )


def evaluate_one(problem: RoutingProblem, assignment: IntArray) -> Terms:
    """Score one assignment, int64[R]."""
    return Terms(*(float(term) for term in evaluate(problem, np.asarray(assignment)[None, :])[0]))
