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

MAX_ITERATIONS: Final = 100
"""Lloyd steps after which clustering ends even if some prompt still changes its cluster."""


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

    Attributes:
        centroids: float64[K, E].
        errors: float64[K, M], 0 to 1.
    """

    centroids: FloatArray
    errors: FloatArray

    def errors_of(self, embeddings: FloatArray) -> FloatArray:
        """float64[R, M]: errors in the nearest cluster of each embedding, float64[R, E]."""
        return np.asarray(self.errors[_nearest(embeddings, self.centroids)])


def fit_clusters(
    training: FloatArray,
    validation: FloatArray,
    mistakes: FloatArray,
    n_clusters: int,
    rng: np.random.Generator,
) -> PromptClusters:
    """Cluster training prompts and count each model's errors on validation prompts.

    K-means with k-means++ seeding. A cluster without a validation prompt gets each model's
    overall error.

    Args:
        training: float64[T, E]; embeddings that the clusters are formed from.
        validation: float64[V, E]; embeddings of the prompts that were scored.
        mistakes: float64[V, M]; 1 - score of each model on each.
        n_clusters: K; at most T.
        rng: for the seeding.

    Raises:
        ValueError: shapes do not agree, or K is not between 1 and T.
    """
    if training.ndim != 2 or validation.ndim != 2 or training.shape[1] != validation.shape[1]:
        raise ValueError("training and validation must be [prompts, E] with the same E")
    if mistakes.ndim != 2 or mistakes.shape[0] != validation.shape[0] or not mistakes.size:
        raise ValueError("mistakes must be [validation prompts, models], at least one of each")
    if not 1 <= n_clusters <= training.shape[0]:
        raise ValueError(f"n_clusters must be 1 to {training.shape[0]}, not {n_clusters}")
    centroids = _k_means(np.asarray(training, dtype=np.float64), n_clusters, rng)
    member_of = _nearest(validation, centroids)
    errors = np.tile(mistakes.mean(axis=0), (n_clusters, 1))
    for k in range(n_clusters):
        inside = member_of == k
        if inside.any():
            errors[k] = mistakes[inside].mean(axis=0)
    return PromptClusters(centroids, errors)


def _nearest(points: FloatArray, centroids: FloatArray) -> IntArray:
    squared = (centroids**2).sum(axis=1) - 2.0 * points @ centroids.T  # [V, K], less |point|^2
    return np.asarray(squared.argmin(axis=1), dtype=np.int64)


def _k_means(points: FloatArray, n_clusters: int, rng: np.random.Generator) -> FloatArray:
    centroids = np.empty((n_clusters, points.shape[1]))
    centroids[0] = points[rng.integers(points.shape[0])]
    distance = ((points - centroids[0]) ** 2).sum(axis=1)
    for k in range(1, n_clusters):
        total = distance.sum()
        shares = distance / total if total > 0.0 else None
        centroids[k] = points[rng.choice(points.shape[0], p=shares)]
        distance = np.minimum(distance, ((points - centroids[k]) ** 2).sum(axis=1))
    member_of = _nearest(points, centroids)
    for _ in range(MAX_ITERATIONS):
        for k in range(n_clusters):
            inside = member_of == k
            if inside.any():
                centroids[k] = points[inside].mean(axis=0)
        moved = _nearest(points, centroids)
        if (moved == member_of).all():
            break
        member_of = moved
    return centroids
