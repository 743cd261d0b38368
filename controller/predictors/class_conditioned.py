"""What the fitted predictors say of a batch at the destinations of a fleet.

DRLM's way: a class from the prompt's embedding, quality and answer length by class and model,
seconds by query, model and device. Of what they were not fitted on they say nothing, and why: a
fleet that grows beyond its measurements falls back to what is known otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controller.domain.cluster import ClusterSnapshot, Destination, Node
from controller.domain.hardware import DeviceClass, ModelConfiguration, configuration_of
from controller.predictors.features import profile_query
from controller.predictors.fitted import FittedPredictors
from controller.predictors.latency_regressor import EncodedPlacements, FeatureLayout
from controller.predictors.reading_writing import Placement
from controller.routing.decision_memory import DecisionMemory

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MOST_CUT_RATIO: Final = 0.1
"""When more of the measured answers than this ran into their limit, they tell neither length nor
seconds of requests with a higher one."""

_OF_NODE: Final = attrgetter("node_id", "device")


@dataclass(frozen=True, slots=True, eq=False)
class ClassPredictions:
    """For R requests and D destinations; NaN where the predictors were not fitted on the like.

    Attributes:
        classes: R; the likeliest class of each request.
        quality: float64[R, D], 0 to 1.
        output_tokens: float64[R, D]; mean length of an answer, at most the request's limit.
        inference_seconds: float64[R, D]; of the engine, without waiting.
        gaps_of_requests: R; why all lengths and seconds of a request are NaN. Empty: they are not.
        gaps_of_destinations: D; why quality, length or seconds at a destination are NaN.
    """

    classes: tuple[str, ...]
    quality: FloatArray
    output_tokens: FloatArray
    inference_seconds: FloatArray
    gaps_of_requests: tuple[str, ...]
    gaps_of_destinations: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Fleet:
    """How a fleet's destinations meet the predictors.

    Attributes:
        column: int64[D]; of the memory of quality and length; -1 is unknown.
        pair: int64[D]; of `placements`; -1 is unknown.
        placements: the different pairs of model and device; None when there is none.
        gaps: as in `ClassPredictions.gaps_of_destinations`.
    """

    column: IntArray
    pair: IntArray
    placements: EncodedPlacements | None
    gaps: tuple[str, ...]


class ClassConditioned:
    """The fitted predictors over fleets; safe to call from several threads.

    Args:
        fitted: of `edge-controller lab fit`.
    """

    def __init__(self, fitted: FittedPredictors) -> None:
        self._fitted = fitted
        self._quality = fitted.quality.expected

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self._fitted.classifier.classes

    def predict(
        self,
        texts: Sequence[str],
        embeddings: NDArray[np.float32],
        max_tokens: FloatArray,
        snapshot: ClusterSnapshot,
        memory: DecisionMemory,
    ) -> ClassPredictions:
        """Estimate a batch.

        Args:
            texts: R prompts.
            embeddings: float32[R, 384] of them.
            max_tokens: float64[R]; longest answer of each request.
            snapshot: whose D destinations are the columns.
            memory: keeps how this fleet meets the predictors.
        """
        fitted, fleet = self._fitted, self._fleet(snapshot, memory)
        queries = fitted.classifier.classify(
            [
                profile_query(text, embedding=row)
                for text, row in zip(texts, embeddings, strict=True)
            ]
        )
        shares = np.stack([np.asarray(query.class_probabilities) for query in queries])
        quality = _taken(shares @ self._quality, fleet.column)
        tokens = _taken(shares @ fitted.output_length.expected, fleet.column)
        seconds = np.full(quality.shape, np.nan)
        if fleet.placements is not None:
            seconds = _taken(
                fitted.latency.predict(queries, fleet.placements, max_tokens), fleet.pair
            )
        gaps = tuple(self._gap_of_limit(limit) for limit in max_tokens)
        is_beyond = np.array([gap != "" for gap in gaps])
        tokens[is_beyond], seconds[is_beyond] = np.nan, np.nan
        return ClassPredictions(
            classes=tuple(self.classes[at] for at in shares.argmax(axis=1)),
            quality=quality,
            output_tokens=np.minimum(tokens, max_tokens[:, None]),
            inference_seconds=seconds,
            gaps_of_requests=gaps,
            gaps_of_destinations=fleet.gaps,
        )

    def _gap_of_limit(self, limit: float) -> str:
        measured = self._fitted.limits
        if limit <= measured.max_tokens or measured.cut_ratio <= MOST_CUT_RATIO:
            return ""
        return (
            f"{limit:.0f} tokens are allowed, and {measured.cut_ratio:.0%} of the measured answers "
            f"were cut at {measured.max_tokens}"
        )

    def _fleet(self, snapshot: ClusterSnapshot, memory: DecisionMemory) -> _Fleet:
        # All of a fleet that decides how it meets these predictors.
        key = (self, tuple(map(_OF_NODE, snapshot.nodes)), memory.columns(snapshot).placements)
        return memory.kept("fitted predictors", key, lambda: self._matched(snapshot))

    def _matched(self, snapshot: ClusterSnapshot) -> _Fleet:
        hosts = {node.node_id: node for node in snapshot.nodes}
        destinations = snapshot.destinations
        nodes = [hosts[destination.node_id] for destination in destinations]
        layout, models = self._fitted.latency.layout, self._fitted.quality.models
        columns = {name: at for at, name in enumerate(models)}
        pairs: dict[Placement, int] = {}
        pair, gaps = [], []
        for node, destination in zip(nodes, destinations, strict=True):
            device = _device_of(node, layout)
            model = configuration_of(
                destination.family, destination.parameters_billions, destination.quantisation
            )
            gap = _gap_of(node, destination, device, model, layout)
            if not gap and device is not None and model is not None:
                pair.append(pairs.setdefault((model, device), len(pairs)))
            else:
                pair.append(-1)
            if not gap and destination.model not in columns:
                gap = f"model {destination.model} was not measured"
            gaps.append(gap)
        return _Fleet(
            np.array([columns.get(d.model, -1) for d in destinations], dtype=np.int64),
            np.array(pair, dtype=np.int64),
            self._fitted.latency.encode(pairs) if pairs else None,
            tuple(gaps),
        )


def _taken(values: FloatArray, columns: IntArray) -> FloatArray:
    """float64[R, D]: the columns of float64[R, K]; NaN where a column is -1."""
    found: FloatArray = np.take(values, columns, axis=1)
    found[:, columns < 0] = np.nan
    return found


def _device_of(node: Node, layout: FeatureLayout) -> DeviceClass | None:
    """The device as the predictors were fitted on it: this very node, or its hardware."""
    if node.device is None:
        return None
    for kind in (str(node.node_id), node.device.kind):
        if kind in layout.kinds:
            return replace(node.device, kind=kind)
    return None


def _gap_of(
    node: Node,
    destination: Destination,
    device: DeviceClass | None,
    model: ModelConfiguration | None,
    layout: FeatureLayout,
) -> str:
    """Why the seconds of a destination cannot be told; empty when they can."""
    if node.device is None:
        return f"{node.node_id} does not say what it is"
    if device is None:
        return f"hardware {node.device.kind!r} was not measured"
    if model is None:
        return f"scale or quantisation of {destination.model} is unknown"
    if model.family not in layout.families:
        return f"model family {model.family!r} was not measured"
    return ""
