"""Class probabilities of a prompt from its embedding, by a random forest in plain arrays.

DRLM section IV-5. scikit-learn grows the forest (controller/lab/training); it is not needed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controller.predictors.features import QueryProfile
from controller.predictors.tree_ensemble import TreeEnsemble

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class QueryClassifier:
    """A forest whose leaves hold class probabilities.

    Attributes:
        classes: names, in the order of all class axes.
        default_class: what an unclear prompt counts as; the class of robust models.
        confidence_threshold: below this highest probability a prompt is unclear.
        forest: leaves of float64[C] that sum to 1; over float32 embeddings.
        sharpness: exponent of the votes' shares before they are made to sum to 1 again. A forest
            is right far more often than its votes are unanimous (ours; 1 leaves them alone).
    """

    classes: tuple[str, ...]
    default_class: str
    confidence_threshold: float
    forest: TreeEnsemble
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if self.default_class not in self.classes:
            raise ValueError(f"the default class {self.default_class!r} is none of {self.classes}")
        if self.forest.n_outputs != len(self.classes):
            raise ValueError("the forest's leaves do not have one probability a class")

    def raw_probabilities(self, embeddings: NDArray[np.float32]) -> FloatArray:
        """float64[Q, C] as the forest votes, sharpened, without the fall-back.

        Args:
            embeddings: float32[Q, 384].
        """
        rows = np.asarray(embeddings, dtype=np.float32).astype(np.float64)
        return sharpened(self.forest.sums(rows) / self.forest.roots.shape[0], self.sharpness)

    def probabilities(self, embeddings: NDArray[np.float32]) -> FloatArray:
        """float64[Q, C], rows sum to 1; an unclear prompt is wholly of the default class."""
        found = self.raw_probabilities(embeddings)
        unclear = found.max(axis=1) < self.confidence_threshold
        found[unclear] = 0.0
        found[unclear, self.classes.index(self.default_class)] = 1.0
        return found

    def classify(self, queries: Sequence[QueryProfile]) -> list[QueryProfile]:
        """The queries with class probabilities; one without an embedding is unclear."""
        default = np.zeros(len(self.classes))
        default[self.classes.index(self.default_class)] = 1.0
        known = [at for at, query in enumerate(queries) if query.embedding is not None]
        found = [replace(query, class_probabilities=default.copy()) for query in queries]
        if known:
            stacked = np.stack([np.asarray(queries[at].embedding) for at in known])
            for at, row in zip(known, self.probabilities(stacked), strict=True):
                found[at] = replace(queries[at], class_probabilities=row)
        return found


def sharpened(shares: FloatArray, sharpness: float) -> FloatArray:
    """float64[Q, C], the shares to a power, made to sum to 1."""
    powers = np.maximum(shares, 1e-9) ** sharpness
    found: FloatArray = powers / powers.sum(axis=1, keepdims=True)
    return found
