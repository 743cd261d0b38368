"""Fitted predictors that are small enough to know what they say."""

import numpy as np

from controller.predictors.fitted import FittedPredictors, MeasuredLimits
from controller.predictors.latency_regressor import FeatureLayout, LatencyPredictor
from controller.predictors.output_length import OutputLength
from controller.predictors.quality_table import QualityTable
from controller.predictors.query_classifier import QueryClassifier
from controller.predictors.tree_ensemble import LEAF, TreeEnsemble

CLASSES = ("poems", "sums")


def tree(feature: int, threshold: float, values: list[list[float]], columns: int) -> TreeEnsemble:
    """One split: `values[0]` at most the threshold, else `values[1]`."""
    return TreeEnsemble(
        roots=np.array([0], dtype=np.int32),
        feature=np.array([feature, LEAF, LEAF], dtype=np.int32),
        threshold=np.array([threshold, 0.0, 0.0]),
        left=np.array([1, 0, 0], dtype=np.int32),
        right=np.array([2, 0, 0], dtype=np.int32),
        missing=np.full(3, 2, dtype=np.int32),
        values=np.array([[0.0] * len(values[0]), *values]),
        n_features=columns,
    )


def fitted_predictors(limits: MeasuredLimits | None = None) -> FittedPredictors:
    """Of two models up to 1 and 3 billion parameters, which take 2 and 6 s on a Pi 5.

    A prompt whose embedding's first number is at most 0 is a poem.
    """
    layout = FeatureLayout(CLASSES, ("small",), ("Pi 5", "node-of-its-own"))
    billions = layout.names.index("model_billions_log")
    return FittedPredictors(
        classifier=QueryClassifier(
            CLASSES, "poems", 0.0, tree(0, 0.0, [[1.0, 0.0], [0.0, 1.0]], 384)
        ),
        quality=QualityTable(
            CLASSES,
            ("small-1b", "small-3b"),
            np.array([[8.0, 2.0], [1.0, 8.0]]),
            np.full((2, 2), 8.0),
        ),
        output_length=OutputLength(
            CLASSES,
            ("small-1b", "small-3b"),
            np.array([[100.0, 80.0], [10.0, 20.0]]),
            np.array([90.0, 15.0]),
        ),
        latency=LatencyPredictor(
            layout,
            tree(billions, 0.5, [[np.log(2.0)], [np.log(6.0)]], len(layout.names)),
            0.1,
        ),
        latency_model="",
        limits=limits or MeasuredLimits(),
    )
