"""Hard constraints: which pairs of request and destination are allowed, and why others are not.

A constraint is never weighed against the objective: it takes the pair away.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controller.domain.cluster import ClusterSnapshot, Destination, Node, NodeKind, NodeState
from controller.domain.refusal import Refusal, RefusalReason
from controller.domain.request import InferenceRequest
from controller.ids import ModelName
from controller.routing.fleet_columns import FleetColumns
from controller.routing.problem import BoolArray, FloatArray, IntArray

_JUDGED: Final = tuple(
    reason
    for reason in RefusalReason
    if reason not in (RefusalReason.FAILED_BEFORE, RefusalReason.AS_KEPT)
)
"""What a request's first decision can tell; the order is that of an explanation."""

_BIT: Final = {reason: 1 << position for position, reason in enumerate(_JUDGED)}


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
    """Which pairs are allowed; the reasons of the others are made only when asked for.

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
        if not code:
            return ()
        return tuple(
            Refusal(reason, self._figures(reason, request_index, destination_index))
            for reason, bit in _BIT.items()
            if code & bit
        )

    def nearest_first(self, request_index: int) -> IntArray:
        """int64[D]: destinations of a request that none takes, those that nearly do at the front.

        Those that only the request's own limits refuse; then those whose context is too small, the
        largest context first; then those that take no work now; then those of other models.
        """
        code = self._refused_by[request_index]
        ranks = [
            (code & _BIT[reason]) != 0
            for reason in (
                RefusalReason.CONTEXT_TOO_SMALL,
                RefusalReason.NODE_UNAVAILABLE,
                RefusalReason.OTHER_MODEL,
            )
        ]
        contexts = np.array([d.context_tokens for d in self._snapshot.destinations])
        smallness = np.where(ranks[0], -contexts, 0)
        return np.lexsort((smallness, *ranks))

    def _figures(self, reason: RefusalReason, r: int, d: int) -> tuple[float | str, ...]:
        limits = self._requests[r].constraints
        predicted = self._predictions
        destination = self._snapshot.destinations[d]
        figures: tuple[float | str | None, ...] = ()
        match reason:
            case RefusalReason.NODE_UNAVAILABLE:
                node = next(n for n in self._snapshot.nodes if n.node_id == destination.node_id)
                figures = (node.refusal or f"the node is {node.state.value}",)
            case RefusalReason.OTHER_MODEL:
                figures = (destination.model, self._requests[r].model)
            case RefusalReason.CONTEXT_TOO_SMALL:
                figures = (
                    predicted.prompt_tokens[r, d],
                    predicted.output_tokens[r, d],
                    destination.context_tokens,
                )
            case RefusalReason.OTHER_NODE:
                figures = (limits.node_id,)
            case RefusalReason.QUALITY_TOO_LOW:
                figures = (predicted.quality[r, d], limits.min_quality_ratio)
            case RefusalReason.DEADLINE_TOO_SOON:
                figures = (predicted.finish_seconds[r, d], limits.deadline_seconds)
            case RefusalReason.PRICE_TOO_HIGH:
                figures = (predicted.cost_usd[r, d], limits.max_price_usd)
        # A limit that is None refuses nothing, so this drops nothing.
        return tuple(
            figure if isinstance(figure, str) else float(figure)
            for figure in figures
            if figure is not None
        )


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
