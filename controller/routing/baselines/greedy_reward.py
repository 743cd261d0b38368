"""One-step argmax of the reward that DRLM's policy is trained on.

What a learned policy must beat: the reward of a step is known when it is taken, so learning can
only gain what a step does to later ones.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.routing.baselines.one_by_one import first_least, send_each
from controller.routing.policy import Budget, Decision
from controller.routing.problem import FloatArray, IntArray, RoutingProblem

QUALITY_WEIGHT: Final = 0.8
"""Alpha of DRLM."""

LATENCY_WEIGHT: Final = 0.3
"""Beta of DRLM."""

STEEPNESS: Final = 3.0
"""k of the normalised exponential (ours: the paper gives no value)."""


@dataclass(frozen=True, slots=True)
class GreedyRewardPolicy:
    """The feasible destination of greatest reward, request by request.

    r = alpha * quality~ - beta * Phi(latency~). Latency is predicted inference, network included,
    plus the wait for what the node has ahead, this batch's earlier requests included. Both are
    scaled to 0..1 over the candidates of the step; Phi(t) = (exp(k t) - 1) / (exp(k) - 1).

    Source: DRLM; routing specification, section 8.
    """

    name: str = "greedy-reward"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign in one pass; the budget is never needed."""

        def choose(r: int, feasible: IntArray, backlog: FloatArray) -> int:
            waiting = backlog[problem.node_of[feasible]]
            took = problem.latency_seconds[r, feasible] + problem.network_seconds[r, feasible]
            gained = rewards(problem.quality[r, feasible], took + waiting)
            return first_least(feasible, -gained)

        return send_each(problem, choose)


def rewards(quality: FloatArray, latency_seconds: FloatArray) -> FloatArray:
    """DRLM's reward of each candidate of one step, float64[candidates]."""
    late = latency_penalty(_scaled(latency_seconds))
    return np.asarray(QUALITY_WEIGHT * _scaled(quality) - LATENCY_WEIGHT * late)


def latency_penalty(scaled: FloatArray) -> FloatArray:
    """Phi(t) = (exp(k t) - 1) / (exp(k) - 1) for t in 0..1; the routing specification, 8."""
    return np.asarray(np.expm1(STEEPNESS * scaled) / np.expm1(STEEPNESS))


def _scaled(values: FloatArray) -> FloatArray:
    """0 to 1 over the candidates; 0 where all are equal."""
    width = values.max() - values.min()
    return np.asarray((values - values.min()) / width if width > 0.0 else np.zeros_like(values))
