"""The fleet as one decision sees it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from controller.domain.answer_length import AnswerLengthCurve
from controller.domain.hardware import DeviceClass
from controller.ids import ModelName, NodeId


class NodeKind(enum.Enum):
    """Where a node stands; placement policies and edge-only requests ask."""

    EDGE = "edge"
    CLOUD = "cloud"


class NodeState(enum.Enum):
    """Only READY nodes are routed to."""

    READY = "ready"
    LOADING = "loading"
    DRAINING = "draining"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """USD; all 0 for a machine of one's own."""

    prompt_usd_per_token: float = 0.0
    completion_usd_per_token: float = 0.0
    request_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured speeds of one model on one node, tokens per second; all above 0.

    Attributes:
        prefill_tokens_per_second: F_P.
        decode_tokens_per_second: F_1, one sequence alone.
        saturated_decode_tokens_per_second: F_B, all slots together; at least F_1.
        utilisation_ratio: u, share of the node's power range in use under load, 0 to 1.
        measured_slots: sequences that decoded at once for F_B; 0 means as many as there are slots.
        load_watts: of the whole node meanwhile; None when not measured.
        engine_version, power_mode: what it was measured with; empty when unknown.
        prefill_joules_per_token, decode_joules_per_token: above idle; None when not measured.
    """

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    saturated_decode_tokens_per_second: float
    utilisation_ratio: float = 1.0
    measured_slots: int = 0
    load_watts: float | None = None
    engine_version: str = ""
    power_mode: str = ""
    prefill_joules_per_token: float | None = None
    decode_joules_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class PowerProfile:
    """Watts of the whole node; link power is extra while it transmits or receives."""

    idle_watts: float
    max_watts: float
    transmit_watts: float = 0.0
    receive_watts: float = 0.0
    is_estimate: bool = True


@dataclass(frozen=True, slots=True)
class NetworkPath:
    """Between controller and node; goodput as the node receives and transmits."""

    round_trip_seconds: float
    receive_bits_per_second: float
    transmit_bits_per_second: float


@dataclass(frozen=True, slots=True)
class InFlightWork:
    """What one request in flight still needs: prompt tokens to read and tokens to write."""

    model: ModelName
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class SessionPrefix:
    """Where the last turn of a conversation was answered.

    Attributes:
        tokens: of that turn, prompt and answer: what the node may still hold.
        hit_ratio: share of such tokens that this destination has really saved lately, 0 to 1.
    """

    node_id: NodeId
    model: ModelName
    tokens: int
    hit_ratio: float


@dataclass(frozen=True, slots=True)
class Destination:
    """A node and a model on it: one column of every routing array.

    Attributes:
        context_tokens: longest prompt plus answer of one sequence.
        slots: sequences decoded at once.
        mean_quality_ratio: expected quality without looking at the prompt, 0 to 1.
        quality_source: where that came from, such as "prior" or "profiled".
        quality_count: observations behind it.
        characters_per_token: of English text under this model's tokenizer.
        refuses_raw_prompts: takes only chats.
        supports_response_format: keeps a `ResponseFormat`.
        free_slots: not claimed now; None when nobody counts.
        next_slot_seconds: predicted time until one is free; 0 while one is.
        answer_lengths: how long its answers get; None when nobody knows.
        extra_prompt_tokens: what its template adds beyond the estimate, from its completions.
    """

    node_id: NodeId
    model: ModelName
    family: str
    parameters_billions: float
    quantisation: str
    context_tokens: int
    slots: int
    has_chat_template: bool
    calibration: Calibration
    price: TokenPrice
    mean_quality_ratio: float
    quality_source: str
    quality_count: int
    characters_per_token: float
    refuses_raw_prompts: bool = False
    supports_response_format: bool = True
    free_slots: int | None = None
    next_slot_seconds: float = 0.0
    answer_lengths: AnswerLengthCurve | None = None
    extra_prompt_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Node:
    """One machine as the profiler knows it now.

    Attributes:
        power: None when neither a sensor nor a model of the board exists.
        backlog_seconds: predicted executor seconds of work ahead of a new batch.
        refusal: why the node takes nothing now; None when it does.
        paper_backlog_seconds: the same by the paper's rule, which hears of dispatches alone.
        in_flight: what its requests still need, in the order of their claims.
        overhead_seconds: of a request outside the engine and the network, from completions.
        receive_usd_per_byte, transmit_usd_per_byte: of its link, to the node and from it.
        device: what it is, as the fitted latency predictor asks; None when it did not say.
    """

    node_id: NodeId
    kind: NodeKind
    state: NodeState
    power: PowerProfile | None
    network: NetworkPath
    backlog_seconds: float
    inflight_requests: int
    refusal: str | None = None
    paper_backlog_seconds: float = 0.0
    in_flight: tuple[InFlightWork, ...] = ()
    overhead_seconds: float = 0.0
    receive_usd_per_byte: float = 0.0
    transmit_usd_per_byte: float = 0.0
    device: DeviceClass | None = None


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """Everything one decision may know, taken at one moment.

    Attributes:
        nodes: in order of node_id.
        destinations: in order of (node_id, model); each names a node of `nodes`.
        sessions: of the conversations that were asked for, those with an earlier turn.
        fleet_version: rises when a node comes or goes, and when a destination does or something
            is learnt of it. Two snapshots of one profiler with the same number have the same nodes,
            by id, and the same destinations but for what requests claim of them. None when nobody
            counts.
    """

    nodes: tuple[Node, ...]
    destinations: tuple[Destination, ...]
    sessions: Mapping[str, SessionPrefix] = field(default_factory=dict)
    fleet_version: int | None = None
