"""Seconds that a model on a device takes for a prompt, by gradient-boosted trees.

DRLM section IV-7: query structure, model configuration and device in, inference time out. The
target is the logarithm (ours: the paper reports R2 on the log scale), and class probabilities are
among the features (ours: they tell how long the answer will be). Where reading and writing were
measured apart, the trees correct what tokens and speeds foretell (ours; `reading_writing.py`).
LightGBM grows the trees (controller/lab/training); it is not needed here.
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
from controller.predictors.reading_writing import PLACEMENT_NAMES, Placement, ReadingWriting
from controller.predictors.tree_ensemble import TreeEnsemble
from controller.predictors.tree_walk import PreparedEnds

FloatArray = NDArray[np.float64]

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
_LONGER: Final = "answer_longer_log"
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
    "speed",
)
"""How the importance of features is summed up, as in the paper's Fig. 5a."""


@dataclass(frozen=True, slots=True)
class FeatureLayout:
    """Which columns the trees were grown on.

    Attributes:
        classes: one column of probabilities each.
        families: model families that were seen; another one has none of their columns set.
        kinds: kinds of devices that were seen; likewise.
        rates: what tokens and speeds foretell; None: the trees start from nothing.
    """

    classes: tuple[str, ...]
    families: tuple[str, ...]
    kinds: tuple[str, ...]
    rates: ReadingWriting | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of all columns: first those of the query, then those of the placement."""
        return (
            *STRUCTURE_NAMES,
            *(_OTHER_CLASS + name for name in self.classes),
            *((_LONGER,) if self.rates else ()),
            *_MODEL_NAMES,
            *(_FAMILY + name for name in self.families),
            *_DEVICE_NAMES,
            *(_KIND + name for name in self.kinds),
            *(PLACEMENT_NAMES if self.rates else ()),
        )

    @property
    def n_query(self) -> int:
        """Columns of the query, which come first."""
        return len(STRUCTURE_NAMES) + len(self.classes) + (self.rates is not None)

    def of_queries(self, queries: Sequence[QueryProfile]) -> FloatArray:
        """float64[Q, n_query]."""
        shares = class_probabilities(queries, len(self.classes))
        columns = [structures(queries), shares]
        if self.rates is not None:
            columns.append(self.rates.of_queries(shares)[:, None])
        return np.hstack(columns)

    def of_placements(self, placements: Iterable[Placement]) -> FloatArray:
        """float64[K, placement columns]; what is unknown of a model is NaN."""
        pairs = list(placements)
        rows = [self._placement(model, device) for model, device in pairs]
        width = len(self.names) - self.n_query
        if self.rates is None:
            return np.array(rows, dtype=np.float64).reshape(len(rows), width)
        told = self.rates.of_placements(pairs)
        numbers = np.array(rows, dtype=np.float64).reshape(len(rows), width - told.shape[1])
        return np.hstack([numbers, told])

    def foretold(
        self, queries: FloatArray, placements: FloatArray, max_tokens: FloatArray | None = None
    ) -> FloatArray:
        """float64[Q, K], log seconds before the trees correct them; 0 without `rates`.

        Args:
            queries: float64[Q, n_query], of `of_queries`.
            placements: float64[K, placement columns], of `of_placements`.
            max_tokens: float64[Q]; each request's longest answer.
        """
        if self.rates is None:
            return np.zeros((queries.shape[0], placements.shape[0]))
        return self.rates.log_seconds(
            queries[:, 0], queries[:, -1], placements[:, -len(PLACEMENT_NAMES) :], max_tokens
        )

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
    if name.startswith(_OTHER_CLASS) or name == _LONGER:
        return "class"
    if name in PLACEMENT_NAMES:
        return "speed"
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
        trees: one output, natural logarithm of seconds, less what the layout foretells.
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
        max_tokens: FloatArray | None = None,
    ) -> FloatArray:
        """float64[Q, K], seconds of inference, the median of what is expected; above 0.

        The mean is higher by the factor exp(residual_sigma^2 / 2).

        Args:
            queries: Q prompts; class probabilities must be of the fitted classes.
            configurations: K models on devices; encoded, they take a tenth of the time.
            max_tokens: float64[Q]; longest answer of each request, where it is less than what was
                measured; heeded where reading and writing were measured apart.
        """
        asked = self.layout.of_queries(queries)
        if isinstance(configurations, EncodedPlacements):
            placements = configurations.features
            corrected = self.trees.sums_of_prepared(asked, configurations.prepared)
        else:
            placements = self.layout.of_placements(configurations)
            shape = (asked.shape[0], placements.shape[0])
            rows = np.empty((*shape, len(self.layout.names)))
            rows[:, :, : self.layout.n_query] = asked[:, None, :]
            rows[:, :, self.layout.n_query :] = placements[None]
            corrected = self.trees.sums(rows.reshape(-1, rows.shape[2]))[:, 0].reshape(shape)
        return np.asarray(np.exp(corrected + self.layout.foretold(asked, placements, max_tokens)))
