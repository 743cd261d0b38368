"""UniRoute: the model of least expected error plus weighed cost, request by request.

Source: "Universal Model Routing for Efficient LLM Inference" (arXiv 2502.08773), the K-means
variant; lambda and the normalised cost as in CEMA V-B.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.routing.baselines.one_by_one import first_least, least_loaded, send_each, ties
from controller.routing.policy import Budget, Decision
from controller.routing.problem import FloatArray, IntArray, RoutingProblem

COST_WEIGHT: Final = 0.05
"""Lambda of the CEMA paper's RouterBench stage."""


@dataclass(frozen=True, slots=True)
class UniRoutePolicy:
    """argmin over destinations of error + lambda * cost / greatest cost of the batch.

    The error is that of the request's cluster (`metadata.cluster_error`, from `PromptClusters`),
    else 1 - predicted quality: in the CEMA deployment UniRoute has the same quality source.

    Attributes:
        cost_weight: lambda.
        spread_ties: replicas of a model tie. False takes the first index, as the CEMA paper
            implies, and crowds one replica; True takes the least loaded of them.
    """

    name: str = "uniroute"
    cost_weight: float = COST_WEIGHT
    spread_ties: bool = False

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign in one pass; the budget is never needed."""
        error = problem.metadata.cluster_error
        if error is None:
            error = 1.0 - problem.quality
        greatest = float(np.where(problem.feasible, problem.cost_usd, 0.0).max())
        scores = error + (self.cost_weight / greatest * problem.cost_usd if greatest > 0.0 else 0.0)

        def choose(r: int, feasible: IntArray, backlog: FloatArray) -> int:
            if not self.spread_ties:
                return first_least(feasible, scores[r, feasible])
            return least_loaded(problem, r, ties(feasible, scores[r, feasible]), backlog)

        return send_each(problem, choose)


def uniroute_fair() -> UniRoutePolicy:
    """The policy `uniroute-fair`: replicas share the load."""
    return UniRoutePolicy("uniroute-fair", spread_ties=True)


@dataclass(frozen=True, slots=True, eq=False)
class PromptClusters:
    """Clusters of prompts, and how often each model errs in each.

    `controller.lab.training.prompt_clusters` fits them.

    Attributes:
        centroids: float64[K, E].
        errors: float64[K, M], 0 to 1.
    """

    centroids: FloatArray
    errors: FloatArray

    def errors_of(self, embeddings: FloatArray) -> FloatArray:
        """float64[R, M]: errors in the nearest cluster of each embedding, float64[R, E]."""
        return np.asarray(self.errors[_nearest(embeddings, self.centroids)])


def _nearest(points: FloatArray, centroids: FloatArray) -> IntArray:
    squared = (centroids**2).sum(axis=1) - 2.0 * points @ centroids.T  # [V, K], less |point|^2
    return np.asarray(squared.argmin(axis=1), dtype=np.int64)
