"""What the profiler is told: the only way in to `ProfilerState`."""

from dataclasses import dataclass

from controller.domain.completion import Usage
from controller.domain.node_report import Health, NodeHello, ReportedModel
from controller.ids import NodeId, RequestId
from controller.profiler.network_profiler import EMPTY_PROBE, ProbeSize
from controller.profiler.request_monitor import Claim


@dataclass(frozen=True, slots=True)
class NodeConnected:
    """A session began."""

    hello: NodeHello
    is_draining: bool


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """A session ended or its lease ran out."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class NodeForgotten:
    """An operator dropped an offline node."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class DrainChanged:
    """An operator drains a node or lifts it."""

    node_id: NodeId
    is_draining: bool


@dataclass(frozen=True, slots=True)
class ModelsReported:
    """The node's whole list of models."""

    node_id: NodeId
    models: tuple[ReportedModel, ...]


@dataclass(frozen=True, slots=True)
class HealthReported:
    """One health sample arrived."""

    node_id: NodeId
    health: Health


@dataclass(frozen=True, slots=True)
class ProbeReturned:
    """A probe came back; empty ones measure the round trip, others the goodput."""

    node_id: NodeId
    seconds: float
    size: ProbeSize = EMPTY_PROBE


@dataclass(frozen=True, slots=True)
class RequestDispatched:
    """A request was claimed for a node."""

    node_id: NodeId
    request_id: RequestId
    claim: Claim


@dataclass(frozen=True, slots=True)
class TokensStreamed:
    """A node made progress on a request."""

    node_id: NodeId
    request_id: RequestId
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request is no longer at the node; the second end of a request changes nothing.

    Attributes:
        is_cancelled: the client went away, or the node cut the answer off.
        usage: what the node measured of a whole answer; None for every other end.
        was_cut: the answer reached its limit.
        session_id: the conversation it belongs to; empty for none.
    """

    node_id: NodeId
    request_id: RequestId
    is_failure: bool
    is_cancelled: bool = False
    usage: Usage | None = None
    was_cut: bool = False
    session_id: str = ""


ProfilerEvent = (
    NodeConnected
    | NodeDisconnected
    | NodeForgotten
    | DrainChanged
    | ModelsReported
    | HealthReported
    | ProbeReturned
    | RequestDispatched
    | TokensStreamed
    | RequestEnded
)
