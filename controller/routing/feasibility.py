"""Hard constraints: which pairs of request and destination are allowed, and why others are not.

A constraint is never weighed against the objective: it takes the pair away.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controller.domain.cluster import ClusterSnapshot, Destination, Node, NodeKind, NodeState
from controller.domain.request import InferenceRequest
from controller.ids import ModelName, NodeId
from controller.routing.fleet_columns import FleetColumns
from controller.routing.problem import BoolArray, FloatArray


class RefusalReason(enum.Enum):
    """What refused a pair; the value is the name that logs and clients see."""

    NODE_UNAVAILABLE = "node_unavailable"
    OTHER_MODEL = "other_model"
    CONTEXT_TOO_SMALL = "context_too_small"
    NO_CHAT_TEMPLATE = "no_chat_template"
    QUALITY_TOO_LOW = "quality_too_low"
    DEADLINE_TOO_SOON = "deadline_too_soon"
    PRICE_TOO_HIGH = "price_too_high"
    NOT_ON_EDGE = "not_on_edge"
    NO_RAW_PROMPTS = "no_raw_prompts"
    NO_RESPONSE_FORMAT = "no_response_format"
    OTHER_NODE = "other_node"


_BIT: Final = {reason: 1 << position for position, reason in enumerate(RefusalReason)}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one destination does not take one request."""

    node_id: NodeId
    model: ModelName
    reason: RefusalReason
    detail: str

    def __str__(self) -> str:
        return f"{self.node_id}/{self.model}: {self.detail}"


@dataclass(frozen=True, slots=True, eq=False)
class PairPredictions:
    """What is predicted of each pair before anything is decided; all float64[R, D].

    Attributes:
        quality: 0 to 1.
        cost_usd: USD.
        prompt_tokens: tokens.
        output_tokens: tokens the answer is expected to have, not yet cut to any context.
        finish_seconds: backlog, service alone and transfer: the soonest possible finish.
    """

    quality: FloatArray
    cost_usd: FloatArray
    prompt_tokens: FloatArray
    output_tokens: FloatArray
    finish_seconds: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class FeasibilityReport:
    """Which pairs are allowed; the reasons of the others are worded only when asked for.

    Attributes:
        feasible: bool[R, D].
    """

    feasible: BoolArray
    _refused_by: NDArray[np.uint16]
    _requests: Sequence[InferenceRequest] = field(repr=False)
    _snapshot: ClusterSnapshot = field(repr=False)
    _predictions: PairPredictions = field(repr=False)

    def refusals_of(self, request_index: int, destination_index: int) -> tuple[Refusal, ...]:
        """Everything that refuses this pair, in the order of `RefusalReason`; empty if allowed."""
        code = int(self._refused_by[request_index, destination_index])
        destination = self._snapshot.destinations[destination_index]
        return tuple(
            Refusal(
                destination.node_id,
                destination.model,
                reason,
                self._detail(reason, request_index, destination_index),
            )
            for reason, bit in _BIT.items()
            if code & bit
        )

    def refusals(self, request_index: int) -> tuple[Refusal, ...]:
        """Everything that refuses this request anywhere, destination by destination."""
        return tuple(
            refusal
            for destination_index in range(len(self._snapshot.destinations))
            for refusal in self.refusals_of(request_index, destination_index)
        )

    def _detail(self, reason: RefusalReason, r: int, d: int) -> str:
        limits = self._requests[r].constraints
        predicted = self._predictions
        destination = self._snapshot.destinations[d]
        if reason is RefusalReason.NODE_UNAVAILABLE:
            node = _nodes_by_id(self._snapshot)[destination.node_id]
            return node.refusal or f"the node is {node.state.value}"
        if reason is RefusalReason.OTHER_MODEL:
            return f"serves {destination.model}, not {self._requests[r].model}"
        if reason is RefusalReason.CONTEXT_TOO_SMALL:
            prompt, answer = predicted.prompt_tokens[r, d], predicted.output_tokens[r, d]
            return (
                f"about {prompt:.0f} prompt and {answer:.0f} answer tokens "
                f"exceed the context of {destination.context_tokens}"
            )
        if reason is RefusalReason.NO_CHAT_TEMPLATE:
            return "the model has no chat template; send a raw prompt"
        if reason is RefusalReason.NO_RAW_PROMPTS:
            return "the model takes no raw prompts; send a chat"
        if reason is RefusalReason.NO_RESPONSE_FORMAT:
            return "the model's engine cannot keep a response format"
        if reason is RefusalReason.OTHER_NODE:
            return f"is not on {limits.node_id}, the only node that was allowed"
        if reason is RefusalReason.QUALITY_TOO_LOW:
            return (
                f"predicted quality {predicted.quality[r, d]:.3f} "
                f"is below {limits.min_quality_ratio}"
            )
        if reason is RefusalReason.DEADLINE_TOO_SOON:
            return (
                f"would finish after {predicted.finish_seconds[r, d]:.3g} s, "
                f"later than {limits.deadline_seconds:g} s"
            )
        if reason is RefusalReason.PRICE_TOO_HIGH:
            return f"costs about {predicted.cost_usd[r, d]:.3g} USD, above {limits.max_price_usd:g}"
        return "the node is in the cloud; the request must stay on the edge"


def judge_pairs(
    requests: Sequence[InferenceRequest],
    snapshot: ClusterSnapshot,
    columns: FleetColumns,
    predictions: PairPredictions,
) -> FeasibilityReport:
    """Decide which pairs are allowed.

    A deadline counts from the window's close and is compared with the soonest possible finish:
    backlog plus this request alone. That takes away what cannot be in time; whether the batch as
    a whole keeps it is the search's affair.

    Args:
        requests: the batch.
        snapshot: its destinations are the columns.
        columns: of the snapshot.
        predictions: float64[R, D] each.
    """
    destinations, node_of = snapshot.destinations, columns.node_of
    refused_by = np.zeros((len(requests), len(destinations)), dtype=np.uint16)

    takes_work = np.array([_takes_work(node) for node in snapshot.nodes], dtype=np.bool_)
    refused_by[:, ~takes_work[node_of]] |= _BIT[RefusalReason.NODE_UNAVAILABLE]
    too_long = predictions.prompt_tokens + predictions.output_tokens > columns.context_tokens
    refused_by[too_long] |= _BIT[RefusalReason.CONTEXT_TOO_SMALL]

    for r, request in enumerate(requests):
        row, limits = refused_by[r], request.constraints
        if request.model is not None:
            row[_serves_another(destinations, request.model)] |= _BIT[RefusalReason.OTHER_MODEL]
        if limits.node_id is not None:
            row[[d.node_id != limits.node_id for d in destinations]] |= _BIT[
                RefusalReason.OTHER_NODE
            ]
        if request.is_chat:
            row[~columns.has_chat_template] |= _BIT[RefusalReason.NO_CHAT_TEMPLATE]
        else:
            row[columns.refuses_raw_prompts] |= _BIT[RefusalReason.NO_RAW_PROMPTS]
        if request.response_format is not None:
            row[~columns.supports_response_format] |= _BIT[RefusalReason.NO_RESPONSE_FORMAT]
        if limits.min_quality_ratio is not None:
            too_low = predictions.quality[r] < limits.min_quality_ratio
            row[too_low] |= _BIT[RefusalReason.QUALITY_TOO_LOW]
        if limits.deadline_seconds is not None:
            too_late = predictions.finish_seconds[r] > limits.deadline_seconds
            row[too_late] |= _BIT[RefusalReason.DEADLINE_TOO_SOON]
        if limits.max_price_usd is not None:
            too_dear = predictions.cost_usd[r] > limits.max_price_usd
            row[too_dear] |= _BIT[RefusalReason.PRICE_TOO_HIGH]
        if limits.edge_only:
            is_cloud = np.array([node.kind is not NodeKind.EDGE for node in snapshot.nodes])
            row[is_cloud[node_of]] |= _BIT[RefusalReason.NOT_ON_EDGE]
    return FeasibilityReport(refused_by == 0, refused_by, tuple(requests), snapshot, predictions)


def _takes_work(node: Node) -> bool:
    return node.state is NodeState.READY and node.refusal is None


def _serves_another(destinations: Sequence[Destination], model: ModelName) -> BoolArray:
    return np.array([d.model != model for d in destinations], dtype=np.bool_)


def _nodes_by_id(snapshot: ClusterSnapshot) -> dict[NodeId, Node]:
    return {node.node_id: node for node in snapshot.nodes}
