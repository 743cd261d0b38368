"""OptLLM as DRLM compares with it: the knee of the front of quality against latency."""

from dataclasses import dataclass

import numpy as np

from controller.routing.baselines.one_by_one import send_each
from controller.routing.policy import Budget, Decision
from controller.routing.problem import FloatArray, IntArray, RoutingProblem


@dataclass(frozen=True, slots=True)
class OptLlmPolicy:
    """For each request, the knee point of the deployed pairs that no other pair dominates.

    Latency takes the place of OptLLM's cost (DRLM). With both axes scaled to 0..1 over the front,
    the knee is the point farthest above the line between the front's ends; of a front of one or
    two points, the one of greater quality. Queues are ignored.
    """

    name: str = "optllm"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign in one pass; the budget is never needed."""

        def choose(r: int, feasible: IntArray, backlog: FloatArray) -> int:
            front = pareto_front(problem.quality[r, feasible], problem.latency_seconds[r, feasible])
            return int(
                feasible[
                    front[
                        knee(
                            problem.quality[r, feasible[front]],
                            problem.latency_seconds[r, feasible[front]],
                        )
                    ]
                ]
            )

        return send_each(problem, choose)


def pareto_front(quality: FloatArray, latency: FloatArray) -> IntArray:
    """Indices of the points that none dominates, in order of rising latency and quality."""
    order = np.lexsort((-quality, latency))
    best_before = np.concatenate(([-np.inf], np.maximum.accumulate(quality[order])[:-1]))
    return np.asarray(order[quality[order] > best_before], dtype=np.int64)


def knee(quality: FloatArray, latency: FloatArray) -> int:
    """Index of the knee of a front in order of rising latency and quality."""
    if quality.size <= 2:
        return int(quality.size - 1)
    rise = (quality - quality[0]) / (quality[-1] - quality[0])
    run = (latency - latency[0]) / (latency[-1] - latency[0])
    return int(np.argmax(rise - run))
