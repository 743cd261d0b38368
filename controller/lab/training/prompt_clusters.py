"""Clusters of prompts for UniRoute, fitted offline."""

import warnings

import numpy as np
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from controller.routing.baselines.uniroute import PromptClusters
from controller.routing.problem import FloatArray


def fit_clusters(
    training: FloatArray,
    validation: FloatArray,
    mistakes: FloatArray,
    n_clusters: int,
    rng: np.random.Generator,
) -> PromptClusters:
    """Cluster training prompts and count each model's errors on validation prompts.

    K-means with k-means++ seeding, by scikit-learn. A cluster without a validation prompt
    gets each model's overall error.

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
    means = KMeans(n_clusters, n_init=1, random_state=int(rng.integers(2**32)))
    with warnings.catch_warnings():
        # Fewer different prompts than clusters: some clusters are alike then.
        warnings.simplefilter("ignore", ConvergenceWarning)
        means.fit(np.asarray(training, dtype=np.float64))
    member_of = means.predict(np.asarray(validation, dtype=np.float64))
    errors = np.tile(mistakes.mean(axis=0), (n_clusters, 1))
    for k in range(n_clusters):
        inside = member_of == k
        if inside.any():
            errors[k] = mistakes[inside].mean(axis=0)
    return PromptClusters(np.asarray(means.cluster_centers_), errors)
