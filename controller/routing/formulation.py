"""From a batch and one snapshot to the arrays of a `RoutingProblem`.

Every formula of section 1 and 2 of `docs/routing.md` that a destination's attributes enter is
here, so a reader finds in one place what a term means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from controller.domain.cluster import ClusterSnapshot, Destination, NodeKind
from controller.domain.request import InferenceRequest
from controller.routing.feasibility import FeasibilityReport, PairPredictions, judge_pairs
from controller.routing.problem import (
    BoolArray,
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
    name_key,
)

DEFAULT_WEIGHTS: Final = (0.25, 0.25, 0.25, 0.25)
"""Quality, cost, energy, time: the default of the CEMA paper."""

TYPICAL_ANSWER_TOKENS: Final = 256.0
"""How long an answer gets when nothing but the model's own ending stops it (ours); a destination's
own completions replace it."""

TEMPLATE_TOKENS_PER_MESSAGE: Final = 5.0
"""Role markers and separators that a chat template puts around one message (ours)."""

REQUEST_OVERHEAD_BYTES: Final = 512.0
"""A request on the wire besides its text: ids, sampling parameters, framing (ours)."""

STREAMED_TOKEN_BYTES: Final = 64.0
"""One streamed token on the wire: its text, its message and the frame's share (ours)."""

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
        power_is_unknown: bool[N]; the node's joules rest on the pessimistic prior.
    """

    problem: RoutingProblem
    snapshot: ClusterSnapshot
    refusals: FeasibilityReport
    prompt_tokens: FloatArray
    output_tokens: FloatArray
    power_is_unknown: BoolArray
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
    cluster_error: FloatArray | None = None,
    transfer_usd_per_byte: float = 0.0,
    marginal_energy_only: bool = False,
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
    - network nu = round trip + 8 * bytes_up / up + 8 * bytes_down / down, and the seconds that
      the node was seen to take outside engine and network;
    - money = p * price_in + o * price_out + fixed + bytes_up * price of the link to the node
      + bytes_down * price of the link back;
    - energy = work * (P_idle + u * (P_max - P_idle)) + 8 * bytes_up / up * P_tx
      + 8 * bytes_down / down * P_rx. Where the node's counters have told joules a token above
      idle, p' * j_P + o * j_D stands for u * (P_max - P_idle) * work. With `marginal_energy_only`
      P_idle is left out, for boards that are never switched off.

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
        cluster_error: float64[R, D]; passed on to the policies that use it.
        transfer_usd_per_byte: price of transfer on top of what each node's link costs.
        marginal_energy_only: leave out the idle power.

    Raises:
        EmptyBatch: no request.
        NoDestination: the snapshot has no destination.
        InvalidWeights: the weights are not four shares of 1.
        ProblemError: a prediction is NaN, negative, or of another shape.
    """
    checked_weights(weights)
    if not requests:
        raise EmptyBatch("the batch has no request; route at least one")
    destinations = snapshot.destinations
    if not destinations:
        raise NoDestination("no node has a model ready; start an agent or wait for its model")
    node_index = {node.node_id: index for index, node in enumerate(snapshot.nodes)}
    try:
        node_of = np.array([node_index[d.node_id] for d in destinations], dtype=np.int64)
    except KeyError as error:
        raise MalformedArray(
            f"a destination names node {error.args[0]}, which is not there"
        ) from None
    columns = _columns(destinations)
    shape = (len(requests), len(destinations))

    characters = np.array([len(request.text) for request in requests], dtype=np.float64)
    messages = np.array([len(r.prompt) if r.is_chat else 0 for r in requests], dtype=np.float64)
    max_tokens = np.array([request.sampling.max_tokens for request in requests], dtype=np.float64)
    prompt_tokens = np.maximum(
        1.0,
        characters[:, None] / columns["characters_per_token"]
        + TEMPLATE_TOKENS_PER_MESSAGE * messages[:, None]
        + columns["extra_prompt_tokens"],
    )
    read_tokens = prompt_tokens - _held_tokens(requests, snapshot, prompt_tokens)
    if output_tokens is None:
        if median_tokens is not None:
            raise ProblemError("median_tokens come with the output_tokens that they belong to")
        lengths = [answer_tokens_at(d, max_tokens) for d in destinations]
        wanted_tokens = np.stack([mean for mean, _ in lengths], axis=1)
        median_tokens = np.stack([median for _, median in lengths], axis=1)
    else:
        wanted_tokens = np.minimum(
            _prediction("output_tokens", output_tokens, shape), max_tokens[:, None]
        )
        median_tokens = (
            wanted_tokens
            if median_tokens is None
            else np.minimum(_prediction("median_tokens", median_tokens, shape), max_tokens[:, None])
        )
    most_tokens = np.maximum(1.0, columns["context_tokens"] - prompt_tokens)
    answer_tokens = np.clip(wanted_tokens, 1.0, most_tokens)

    read_seconds = read_tokens / columns["prefill_rate"]
    latency = read_seconds + answer_tokens / columns["decode_rate"]
    work = read_seconds + answer_tokens / columns["saturated_decode_rate"]
    if inference_seconds is not None:
        told = np.where(np.isnan(inference_seconds), latency, inference_seconds)
        scale = _prediction("inference_seconds", told, shape) / latency
        latency, work = latency * scale, work * scale

    bytes_up = REQUEST_OVERHEAD_BYTES + np.array(
        [len(request.text.encode("utf-8", "surrogatepass")) for request in requests],
        dtype=np.float64,
    )
    bytes_down = STREAMED_TOKEN_BYTES * answer_tokens  # [R, D]
    paths = [node.network for node in snapshot.nodes]
    up = np.array([path.up_bits_per_second for path in paths])[node_of]
    down = np.array([path.down_bits_per_second for path in paths])[node_of]
    round_trip = np.array([path.round_trip_seconds for path in paths])[node_of]
    up_seconds = 8.0 * bytes_up[:, None] / up
    down_seconds = 8.0 * bytes_down / down
    overhead = np.array([node.overhead_seconds for node in snapshot.nodes])[node_of]
    network = round_trip + up_seconds + down_seconds + overhead

    receive_price = np.array([node.receive_usd_per_byte for node in snapshot.nodes])[node_of]
    transmit_price = np.array([node.transmit_usd_per_byte for node in snapshot.nodes])[node_of]
    cost = (
        prompt_tokens * columns["prompt_usd_per_token"]
        + answer_tokens * columns["completion_usd_per_token"]
        + columns["request_usd"]
        + bytes_up[:, None] * (receive_price + transfer_usd_per_byte)
        + bytes_down * (transmit_price + transfer_usd_per_byte)
    )

    power_is_unknown = np.array([node.power is None for node in snapshot.nodes], dtype=np.bool_)
    powers = [node.power for node in snapshot.nodes]
    transmit = np.array([0.0 if power is None else power.transmit_watts for power in powers])
    receive = np.array([0.0 if power is None else power.receive_watts for power in powers])
    idle, most = (
        np.array([math.nan if power is None else watts(power) for power in powers])[node_of]
        for watts in (attrgetter("idle_watts"), attrgetter("max_watts"))
    )
    base = 0.0 * idle if marginal_energy_only else idle  # NaN where the power is unknown
    processing = work * _processing_watts(snapshot, node_of, base + columns["use"] * (most - idle))
    counted = (
        work * base
        + read_tokens * columns["prefill_joules_per_token"]
        + answer_tokens * columns["decode_joules_per_token"]
    )
    processing = np.where(np.isnan(counted), processing, counted)
    energy = processing + up_seconds * transmit[node_of] + down_seconds * receive[node_of]

    if quality is None:
        quality = np.broadcast_to(columns["mean_quality_ratio"], shape)
    else:
        quality = _prediction("quality", quality, shape)
    backlog = np.array([node.backlog_seconds for node in snapshot.nodes], dtype=np.float64)
    report = judge_pairs(
        requests,
        snapshot,
        PairPredictions(
            quality=quality,
            cost_usd=cost,
            prompt_tokens=prompt_tokens,
            output_tokens=wanted_tokens,
            finish_seconds=backlog[node_of] + latency + network,
        ),
    )
    names = [d.model for d in destinations]
    models = {model: index for index, model in enumerate(sorted(set(names)))}
    model_of = np.array([models[model] for model in names], dtype=np.int64)
    keys = np.array([name_key(model) for model in models], dtype=np.int64)
    problem = RoutingProblem(
        quality=quality,
        cost_usd=cost,
        energy_joules=energy,
        work_seconds=work,
        latency_seconds=latency,
        network_seconds=network,
        node_of=node_of,
        backlog_seconds=backlog,
        feasible=report.feasible,
        weights=np.asarray(weights, dtype=np.float64),
        normalisation=normalisation,
        metadata=ProblemMetadata(
            node_is_edge=np.array([node.kind is NodeKind.EDGE for node in snapshot.nodes]),
            model_of=model_of,
            slots=np.maximum(1, columns["slots"]).astype(np.int64),
            parameters_billions=columns["parameters_billions"],
            predicted_tokens=(prompt_tokens + answer_tokens).mean(axis=1),
            class_quality=class_quality,
            cluster_error=cluster_error,
            node_key=np.array([name_key(node.node_id) for node in snapshot.nodes], dtype=np.int64),
            model_key=keys[model_of],
        ),
    )
    return FormulatedBatch(
        problem,
        snapshot,
        report,
        prompt_tokens,
        answer_tokens,
        power_is_unknown,
        read_tokens,
        np.clip(median_tokens, 1.0, most_tokens),
    )


def expected_answer_tokens(max_tokens: FloatArray) -> FloatArray:
    """Answer length when nothing but the limit is known: m * A / (m + A), A = 256 (ours).

    Close to the limit while the limit is what ends the answer, and saturating at a typical
    answer when it is far away: 28 tokens at 32, 128 at 256, 241 at 4096.
    """
    expected: FloatArray = max_tokens * TYPICAL_ANSWER_TOKENS / (max_tokens + TYPICAL_ANSWER_TOKENS)
    return expected


def answer_tokens_at(
    destination: Destination, max_tokens: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """float64[R] twice: mean and median length of a destination's answers with these limits."""
    curve = destination.answer_lengths
    if curve is None:
        expected = expected_answer_tokens(max_tokens)
        return expected, expected
    starts = np.array(curve.tokens)
    survival = np.array(curve.survival)  # of each stretch that begins at `starts`
    before = np.concatenate(([0.0], np.cumsum(survival[:-1] * np.diff(starts))))
    stretch = np.searchsorted(starts, max_tokens, side="right") - 1
    mean = before[stretch] + survival[stretch] * (max_tokens - starts[stretch])
    return mean, np.minimum(max_tokens, curve.median_tokens)


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


_COLUMNS: Final = (
    "characters_per_token",
    "context_tokens",
    "extra_prompt_tokens",
    "mean_quality_ratio",
    "slots",
    "parameters_billions",
    "prefill_rate",
    "decode_rate",
    "saturated_decode_rate",
    "use",
    "prefill_joules_per_token",
    "decode_joules_per_token",
    "prompt_usd_per_token",
    "completion_usd_per_token",
    "request_usd",
)


def _columns(destinations: Sequence[Destination]) -> dict[str, FloatArray]:
    """Numbers of the destinations by name, float64[D] each; NaN is unknown.

    In one pass: with a thousand destinations a pass for each takes longer than a policy thinks.
    """
    rows = chain.from_iterable(
        (
            d.characters_per_token,
            d.context_tokens,
            d.extra_prompt_tokens,
            d.mean_quality_ratio,
            d.slots,
            d.parameters_billions,
            speeds.prefill_rate,
            speeds.decode_rate,
            speeds.saturated_decode_rate,
            speeds.utilisation_ratio,
            math.nan
            if speeds.prefill_joules_per_token is None
            else speeds.prefill_joules_per_token,
            math.nan if speeds.decode_joules_per_token is None else speeds.decode_joules_per_token,
            price.prompt_usd_per_token,
            price.completion_usd_per_token,
            price.request_usd,
        )
        for d in destinations
        for speeds, price in ((d.calibration, d.price),)
    )
    count = len(destinations) * len(_COLUMNS)
    table = np.fromiter(rows, dtype=np.float64, count=count).reshape(-1, len(_COLUMNS))
    return dict(zip(_COLUMNS, np.ascontiguousarray(table.T), strict=True))


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
