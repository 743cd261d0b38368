"""Seconds that a model on a device takes for a prompt, by gradient-boosted trees.

DRLM section IV-7: query structure, model configuration and device in, inference time out. The
target is the logarithm (ours: the paper reports R2 on the log scale), and class probabilities are
among the features (ours: they tell how long the answer will be). LightGBM grows the trees
(controller/training); it is not needed here.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controller.domain.hardware import DeviceClass, ModelConfiguration
from controller.predictors.features import (
    STRUCTURE_NAMES,
    QueryProfile,
    class_probabilities,
    structures,
)
from controller.predictors.tree_ensemble import PreparedEnds, TreeEnsemble

FloatArray = NDArray[np.float64]

Placement = tuple[ModelConfiguration, DeviceClass]
"""A model on a class of devices: what DRLM calls an action, up to the choice of the machine."""

_MODEL_NAMES: Final = (
    "model_billions_log",
    "model_quantisation_bits",
    "model_layers",
    "model_heads",
    "model_bytes_log",
)
_DEVICE_NAMES: Final = (
    "device_cores",
    "device_memory_log",
    "device_accelerator_cores",
    "device_cpu_share_ratio",
)
_OTHER_CLASS: Final = "class:"
_FAMILY: Final = "family:"
_KIND: Final = "device:"

FEATURE_GROUPS: Final = (
    "length",
    "structure",
    "class",
    "architecture",
    "size",
    "quantisation",
    "device",
)
"""How the importance of features is summed up, as in the paper's Fig. 5a."""


@dataclass(frozen=True, slots=True)
class FeatureLayout:
    """Which columns the trees were grown on.

    Attributes:
        classes: one column of probabilities each.
        families: model families that were seen; another one has none of their columns set.
        kinds: kinds of devices that were seen; likewise.
    """

    classes: tuple[str, ...]
    families: tuple[str, ...]
    kinds: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all columns: first those of the query, then those of the placement."""
        return (
            *STRUCTURE_NAMES,
            *(_OTHER_CLASS + name for name in self.classes),
            *_MODEL_NAMES,
            *(_FAMILY + name for name in self.families),
            *_DEVICE_NAMES,
            *(_KIND + name for name in self.kinds),
        )

    @property
    def n_query(self) -> int:
        """Columns of the query, which come first."""
        return len(STRUCTURE_NAMES) + len(self.classes)

    def of_queries(self, queries: Sequence[QueryProfile]) -> FloatArray:
        """float64[Q, n_query]."""
        return np.hstack([structures(queries), class_probabilities(queries, len(self.classes))])

    def of_placements(self, placements: Iterable[Placement]) -> FloatArray:
        """float64[K, placement columns]; what is unknown of a model is NaN."""
        rows = [self._placement(model, device) for model, device in placements]
        width = len(self.names) - self.n_query
        return np.array(rows, dtype=np.float64).reshape(len(rows), width)

    def _placement(self, model: ModelConfiguration, device: DeviceClass) -> list[float]:
        return [
            math.log(model.billions),
            float(model.quantisation_bits),
            math.nan if model.layers is None else float(model.layers),
            math.nan if model.heads is None else float(model.heads),
            math.log(model.weight_bytes),
            *(float(model.family == name) for name in self.families),
            float(device.cores),
            math.log(device.memory_bytes),
            float(device.accelerator_cores),
            device.cpu_share_ratio,
            *(float(device.kind == name) for name in self.kinds),
        ]


def feature_group(name: str) -> str:
    """Which of `FEATURE_GROUPS` a column belongs to."""
    if name in {"prompt_tokens", "prompt_words", "prompt_characters"}:
        return "length"
    if name in STRUCTURE_NAMES:
        return "structure"
    if name.startswith(_OTHER_CLASS):
        return "class"
    if name == "model_quantisation_bits":
        return "quantisation"
    if name in {"model_billions_log", "model_bytes_log"}:
        return "size"
    if name in _MODEL_NAMES or name.startswith(_FAMILY):
        return "architecture"
    return "device"


@dataclass(frozen=True, slots=True)
class EncodedPlacements:
    """Placements as the trees read them, to be encoded once and asked about often.

    Attributes:
        features: float64[K, placement columns].
        prepared: how the trees part them.
    """

    features: FloatArray
    prepared: PreparedEnds


@dataclass(frozen=True, slots=True)
class LatencyPredictor:
    """Trees that predict the logarithm of seconds.

    Attributes:
        layout: of the columns.
        trees: one output, natural logarithm of seconds.
        residual_sigma: standard deviation of log(measured / predicted) on held-out queries: the
            sigma of a lognormal error, for a simulator's noise.
    """

    layout: FeatureLayout
    trees: TreeEnsemble
    residual_sigma: float

    def __post_init__(self) -> None:
        if self.trees.n_outputs != 1 or self.trees.n_features != len(self.layout.names):
            raise ValueError(
                f"latency trees over {self.trees.n_features} features with {self.trees.n_outputs} "
                f"outputs do not fit the layout of {len(self.layout.names)} features"
            )

    def encode(self, placements: Iterable[Placement]) -> EncodedPlacements:
        """The placements, ready for `predict`; worth it when they are asked about again."""
        features = self.layout.of_placements(placements)
        return EncodedPlacements(features, self.trees.prepare(features))

    def predict(
        self,
        queries: Sequence[QueryProfile],
        configurations: Sequence[Placement] | EncodedPlacements,
    ) -> FloatArray:
        """float64[Q, K], seconds of inference, the median of what is expected; above 0.

        The mean is higher by the factor exp(residual_sigma^2 / 2).

        Args:
            queries: Q prompts; class probabilities must be of the fitted classes.
            configurations: K models on devices; encoded, they take a tenth of the time.
        """
        asked = self.layout.of_queries(queries)
        if isinstance(configurations, EncodedPlacements):
            return np.exp(self.trees.sums_of_prepared(asked, configurations.prepared))
        n_queries, n_placements = len(queries), len(configurations)
        rows = np.empty((n_queries, n_placements, len(self.layout.names)))
        rows[:, :, : self.layout.n_query] = asked[:, None, :]
        rows[:, :, self.layout.n_query :] = self.layout.of_placements(configurations)[None]
        flat = rows.reshape(n_queries * n_placements, -1)
        return np.exp(self.trees.sums(flat)[:, 0]).reshape(n_queries, n_placements)
