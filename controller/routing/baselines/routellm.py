"""RouteLLM as DRLM compares with it: one strong model against a pool of weak ones."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.routing.baselines.one_by_one import class_quality, first_least, send_each
from controller.routing.policy import Budget, Decision
from controller.routing.problem import (
    FloatArray,
    IntArray,
    MissingMetadata,
    RoutingProblem,
)

THRESHOLD: Final = 0.5
"""Least probability that the strong model is better for which it is asked."""


@dataclass(frozen=True, slots=True)
class RouteLlmPolicy:
    """The strong model where it probably answers better, else the best weak one.

    The strong model is the largest, or without sizes the one of greatest mean quality. With both
    right or wrong independently and ties split, it is better than the best weak one with
    probability q_s (1 - q_w) + (q_s q_w + (1 - q_s)(1 - q_w)) / 2 (ours: RouteLLM learns this
    from preferences). Of the chosen model's destinations, the one of least predicted latency.
    Queues are ignored.

    Attributes:
        threshold: the strong model is asked above it.
    """

    name: str = "routellm"
    threshold: float = THRESHOLD

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign in one pass; the budget is never needed.

        Raises:
            MissingMetadata: the problem does not say which destinations serve the same model.
        """
        model_of = problem.metadata.model_of
        if model_of is None:
            raise MissingMetadata(self.name, "model_of")
        quality = class_quality(problem)
        is_strong = model_of == _strong_model(problem, model_of)

        def choose(r: int, feasible: IntArray, backlog: FloatArray) -> int:
            strong, weak = feasible[is_strong[feasible]], feasible[~is_strong[feasible]]
            if not strong.size or not weak.size:
                pool = strong if strong.size else weak
            else:
                q_strong, q_weak = quality[r, strong].max(), quality[r, weak].max()
                both = q_strong * q_weak + (1.0 - q_strong) * (1.0 - q_weak)
                better = q_strong * (1.0 - q_weak) + both / 2.0
                pool = strong if better > self.threshold else weak
            best_model = model_of[first_least(pool, -quality[r, pool])]
            hosts = pool[model_of[pool] == best_model]
            return first_least(hosts, problem.latency_seconds[r, hosts])

        return send_each(problem, choose)


def _strong_model(problem: RoutingProblem, model_of: IntArray) -> int:
    size = problem.metadata.parameters_billions
    strength = problem.quality.mean(axis=0) if size is None else size
    return int(model_of[np.argmax(strength)])
