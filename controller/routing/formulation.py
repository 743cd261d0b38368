"""From a batch and one snapshot to the arrays of a `RoutingProblem`.

Every formula of section 1 and 2 of `docs/routing.md` that a destination's attributes enter is
here, so a reader finds in one place what a term means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from controller.domain.cluster import ClusterSnapshot, Node, NodeKind
from controller.domain.link_traffic import STREAMED_TOKEN_BYTES, received_bytes
from controller.domain.request import InferenceRequest
from controller.routing.completion import own_finish
from controller.routing.decision_memory import DecisionMemory
from controller.routing.feasibility import FeasibilityReport, PairPredictions, judge_pairs
from controller.routing.fleet_columns import FleetColumns
from controller.routing.problem import (
    EmptyBatch,
    FloatArray,
    IntArray,
    InvalidValue,
    MalformedArray,
    NoDestination,
    Normalisation,
    ProblemError,
    ProblemMetadata,
    RoutingProblem,
    checked_weights,
)

DEFAULT_WEIGHTS: Final = (0.25, 0.25, 0.25, 0.25)
"""Quality, cost, energy, time: the default of the CEMA paper."""

TEMPLATE_TOKENS_PER_MESSAGE: Final = 5.0
"""Role markers and separators that a chat template puts around one message (ours)."""

_MOST_HELD_RATIO: Final = 0.9
"""Of a prompt, so that a turn that repeats an earlier one still costs something."""

UNKNOWN_POWER_WATTS: Final = {NodeKind.EDGE: 15.0, NodeKind.CLOUD: 400.0}
"""Power under load of a node when no node of the fleet has a known one: the high end of a single
board computer, and a data-centre accelerator with its host (ours)."""


@dataclass(frozen=True, slots=True, eq=False)
class FormulatedBatch:
    """A problem and what its axes stand for.

    Attributes:
        problem: columns in the order of the snapshot's destinations, nodes in that of its nodes.
        snapshot: what it was built from; `snapshot.destinations[d]` is column d.
        refusals: why pairs are not feasible, worded on demand.
        prompt_tokens: float64[R, D]; under each destination's tokenizer.
        output_tokens: float64[R, D]; expected, cut to max_tokens and to the context.
        median_tokens: float64[R, D]; like output_tokens, but the length that half of such answers
            exceed: what one answer is judged by, while sums need the mean.
        read_tokens: float64[R, D]; prompt tokens without those that the destination is expected to
            hold still from the conversation's last turn.
    """

    problem: RoutingProblem
    snapshot: ClusterSnapshot
    refusals: FeasibilityReport
    prompt_tokens: FloatArray
    output_tokens: FloatArray
    read_tokens: FloatArray
    median_tokens: FloatArray


def formulate(
    requests: Sequence[InferenceRequest],
    snapshot: ClusterSnapshot,
    weights: ArrayLike = DEFAULT_WEIGHTS,
    normalisation: Normalisation = Normalisation.PAYOFF,
    quality: FloatArray | None = None,
    output_tokens: FloatArray | None = None,
    median_tokens: FloatArray | None = None,
    *,
    inference_seconds: FloatArray | None = None,
    class_quality: FloatArray | None = None,
    marginal_energy_only: bool = False,
    memory: DecisionMemory | None = None,
) -> FormulatedBatch:
    """Build the arrays of one decision.

    With p prompt tokens, o output tokens, the destination's rates F_P, F_1, F_B and its node's
    power and network:

    - p = characters / characters_per_token + 5 a chat message + what the destination's template
      was seen to add, at least 1;
    - o = `output_tokens`, or what the destination's own answers were like, or
      `expected_answer_tokens(max_tokens)`; cut to max_tokens and to what the context leaves;
    - p' = p less what the destination is expected to hold of the conversation's last turn;
    - latency tau = p' / F_P + o / F_1; work = p' / F_P + o / F_B;
    - network nu = round trip + s_rx + s_tx, and the seconds that the node was seen to take outside
      engine and network; the node receives the prompt, s_rx = 8 * prompt bytes / receive rate, and
      transmits the answer, s_tx = 8 * answer bytes / transmit rate;
    - money = p * price_in + o * price_out + fixed + prompt bytes * receive price of the link
      + answer bytes * transmit price;
    - energy = work * (P_idle + load) + s_rx * P_rx + s_tx * P_tx, on the node's own radio. The
      load is what the calibration counted per token, (p' * j_P + o * j_D) / work; or measured as
      power, P_load - P_idle; or u * (P_max - P_idle) with the u of the calibration. With
      `marginal_energy_only` P_idle is left out, for boards that are never switched off.

    A node of unknown power is charged the greatest processing watts among the destinations of
    known power, or `UNKNOWN_POWER_WATTS` when there are none: unknown is never zero joules.

    Args:
        requests: the batch, in batch order.
        snapshot: the fleet; all its destinations become columns, refused ones too.
        weights: quality, cost, energy, time; sum 1.
        normalisation: how the terms' bounds are computed.
        quality: float64[R, D], 0 to 1; None takes each destination's mean.
        output_tokens: float64[R, D], predicted mean answer length; None takes the destinations'
            own answers, or estimates from max_tokens.
        median_tokens: float64[R, D], predicted median answer length; None takes output_tokens.
        inference_seconds: float64[R, D], predicted seconds of the engine for the whole answer,
            alone; NaN where nobody predicts them. They replace tau, and work is scaled with it.
        class_quality: float64[R, D]; passed on to the policies that use it.
        marginal_energy_only: leave out the idle power.
        memory: what earlier decisions have read of this fleet; None reads all of it.

    Raises:
        EmptyBatch: no request.
        NoDestination: the snapshot has no destination.
        InvalidWeights: the weights are not four shares of 1.
        ProblemError: a prediction is NaN, negative, or of another shape.
    """
    checked_weights(weights)
    if not requests:
        raise EmptyBatch("the batch has no request; route at least one")
    if not snapshot.destinations:
        raise NoDestination("no node has a model ready; start an agent or wait for its model")
    memory = memory or DecisionMemory()
    columns, nodes = memory.columns(snapshot), _node_columns(snapshot.nodes)
    node_of, there = columns.node_of, nodes.at(columns.node_of)
    shape = (len(requests), len(snapshot.destinations))

    characters = np.array([len(request.text) for request in requests], dtype=np.float64)
    messages = np.array([len(r.prompt) if r.is_chat else 0 for r in requests], dtype=np.float64)
    max_tokens = np.array([request.sampling.max_tokens for request in requests], dtype=np.float64)
    prompt_tokens = np.maximum(
        1.0,
        characters[:, None] / columns.characters_per_token
        + TEMPLATE_TOKENS_PER_MESSAGE * messages[:, None]
        + columns.extra_prompt_tokens,
    )
    read_tokens = prompt_tokens - _held_tokens(requests, snapshot, prompt_tokens)
    if output_tokens is None:
        if median_tokens is not None:
            raise ProblemError("median_tokens come with the output_tokens that they belong to")
        wanted_tokens, median_tokens = memory.answer_lengths(snapshot).within(max_tokens)
    else:
        wanted_tokens = np.minimum(
            _prediction("output_tokens", output_tokens, shape), max_tokens[:, None]
        )
        median_tokens = (
            wanted_tokens
            if median_tokens is None
            else np.minimum(_prediction("median_tokens", median_tokens, shape), max_tokens[:, None])
        )
    most_tokens = np.maximum(1.0, columns.context_tokens - prompt_tokens)
    written_tokens = np.clip(wanted_tokens, 1.0, most_tokens)

    read_seconds = read_tokens / columns.prefill_tokens_per_second
    latency = read_seconds + written_tokens / columns.decode_tokens_per_second
    work = read_seconds + written_tokens / columns.saturated_decode_tokens_per_second
    if inference_seconds is not None:
        told = np.where(np.isnan(inference_seconds), latency, inference_seconds)
        scale = _prediction("inference_seconds", told, shape) / latency
        latency, work = latency * scale, work * scale

    received = np.array([[received_bytes(request)] for request in requests])  # [R, 1]
    transmitted = STREAMED_TOKEN_BYTES * written_tokens  # [R, D]
    receive_seconds = 8.0 * received / there.receive_bits_per_second
    transmit_seconds = 8.0 * transmitted / there.transmit_bits_per_second
    network = there.round_trip_seconds + receive_seconds + transmit_seconds + there.overhead_seconds

    cost = (
        prompt_tokens * columns.prompt_usd_per_token
        + written_tokens * columns.completion_usd_per_token
        + columns.request_usd
        + received * there.receive_usd_per_byte
        + transmitted * there.transmit_usd_per_byte
    )

    base = 0.0 * there.idle_watts if marginal_energy_only else there.idle_watts  # NaN is unknown
    busy = np.where(
        np.isnan(columns.load_watts),
        base + columns.utilisation_ratio * (there.max_watts - there.idle_watts),
        # A node that never told its idle power is charged all that was measured.
        np.where(
            np.isnan(there.idle_watts),
            columns.load_watts,
            np.maximum(columns.load_watts - there.idle_watts, 0.0) + base,
        ),
    )
    counted = (
        work * base
        + read_tokens * columns.prefill_joules_per_token
        + written_tokens * columns.decode_joules_per_token
    )
    processing = np.where(
        np.isnan(counted), work * _processing_watts(snapshot, node_of, busy), counted
    )
    energy = (
        processing + receive_seconds * there.receive_watts + transmit_seconds * there.transmit_watts
    )

    if quality is None:
        quality = np.broadcast_to(columns.mean_quality_ratio, shape)
    else:
        quality = _prediction("quality", quality, shape)
    report = judge_pairs(
        requests,
        snapshot,
        columns,
        PairPredictions(
            quality=quality,
            cost_usd=cost,
            prompt_tokens=prompt_tokens,
            output_tokens=wanted_tokens,
            finish_seconds=own_finish(there.backlog_seconds, latency, network),
        ),
    )
    problem = RoutingProblem(
        quality=quality,
        cost_usd=cost,
        energy_joules=energy,
        work_seconds=work,
        latency_seconds=latency,
        network_seconds=network,
        node_of=node_of,
        backlog_seconds=nodes.backlog_seconds,
        feasible=report.feasible,
        weights=np.asarray(weights, dtype=np.float64),
        normalisation=normalisation,
        metadata=_metadata(columns, nodes, prompt_tokens + written_tokens, class_quality),
    )
    return FormulatedBatch(
        problem,
        snapshot,
        report,
        prompt_tokens,
        written_tokens,
        read_tokens,
        np.clip(median_tokens, 1.0, most_tokens),
    )


def _metadata(
    columns: FleetColumns,
    nodes: "_NodeColumns",
    tokens: FloatArray,
    class_quality: FloatArray | None,
) -> ProblemMetadata:
    return ProblemMetadata(
        node_is_edge=nodes.is_edge != 0.0,
        model_of=columns.model_of,
        slots=np.maximum(1, columns.slots).astype(np.int64),
        parameters_billions=columns.parameters_billions,
        predicted_tokens=tokens.mean(axis=1),
        class_quality=class_quality,
        node_key=columns.node_key,
        model_key=columns.model_key,
    )


def _held_tokens(
    requests: Sequence[InferenceRequest], snapshot: ClusterSnapshot, prompt_tokens: FloatArray
) -> FloatArray:
    """float64[R, D]: prompt tokens that need not be read anew, by expectation.

    A conversation's next turn begins with its last one, so where that was answered, at most all of
    it but the last tokens is still there, weighted by how often that has come true.
    """
    held = np.zeros_like(prompt_tokens)
    if not snapshot.sessions:
        return held
    columns = {(d.node_id, d.model): index for index, d in enumerate(snapshot.destinations)}
    for r, request in enumerate(requests):
        last = snapshot.sessions.get(request.session_id) if request.session_id else None
        index = None if last is None else columns.get((last.node_id, last.model))
        if last is not None and index is not None:
            most = min(float(last.tokens), _MOST_HELD_RATIO * prompt_tokens[r, index])
            held[r, index] = last.hit_ratio * most
    return held


class _NodeColumns(NamedTuple):
    """Numbers of the nodes, float64[N] each, or float64[D] of the destinations' nodes.

    NaN is unknown; the watts of a link are 0 then.
    """

    backlog_seconds: FloatArray
    round_trip_seconds: FloatArray
    receive_bits_per_second: FloatArray
    transmit_bits_per_second: FloatArray
    overhead_seconds: FloatArray
    receive_usd_per_byte: FloatArray
    transmit_usd_per_byte: FloatArray
    idle_watts: FloatArray
    max_watts: FloatArray
    transmit_watts: FloatArray
    receive_watts: FloatArray
    is_edge: FloatArray

    def at(self, node_of: IntArray) -> "_NodeColumns":
        """The same of each destination's node."""
        return _NodeColumns(*np.take(np.stack(self), node_of, axis=1))


def _node_columns(nodes: Sequence[Node]) -> _NodeColumns:
    """In one pass: a pass for each number takes longer than a policy thinks."""
    unknown = (math.nan, math.nan, 0.0, 0.0)
    rows = [
        (
            node.backlog_seconds,
            path.round_trip_seconds,
            path.receive_bits_per_second,
            path.transmit_bits_per_second,
            node.overhead_seconds,
            node.receive_usd_per_byte,
            node.transmit_usd_per_byte,
            *(
                unknown
                if power is None
                else (
                    power.idle_watts,
                    power.max_watts,
                    power.transmit_watts,
                    power.receive_watts,
                )
            ),
            node.kind is NodeKind.EDGE,
        )
        for node in nodes
        for path, power in ((node.network, node.power),)
    ]
    return _NodeColumns(*np.ascontiguousarray(np.array(rows, dtype=np.float64).T))


def _processing_watts(
    snapshot: ClusterSnapshot, node_of: IntArray, watts: FloatArray
) -> FloatArray:
    """float64[D]: what one busy executor second draws, where NaN was unknown."""
    unknown = np.isnan(watts)
    if unknown.all():
        priors = np.array([UNKNOWN_POWER_WATTS[node.kind] for node in snapshot.nodes])
        return np.asarray(priors[node_of])
    return np.where(unknown, watts[~unknown].max(), watts)


def _prediction(name: str, values: FloatArray, shape: tuple[int, int]) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != shape:
        raise MalformedArray(f"{name} has shape {array.shape}; expected {shape}")
    if not np.isfinite(array).all() or (array < 0.0).any():
        raise InvalidValue(f"{name} holds a NaN, an infinity or a negative number")
    return array
