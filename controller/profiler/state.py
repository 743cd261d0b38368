"""Everything the router knows about the fleet: events in, one snapshot out.

First version: calibrations come from the agents' own measurements and quality from a prior.
"""

from dataclasses import dataclass, field

from controller.domain.cluster import (
    ClusterSnapshot,
    Destination,
    NetworkPath,
    Node,
    NodeKind,
    NodeState,
)
from controller.domain.node_report import Health, ModelPhase, NodeHello, ReportedModel
from controller.ids import ModelName, NodeId, RequestId
from controller.profiler.quality_prior import quality_prior
from controller.profiler.request_monitor import RequestMonitor

_DEFAULT_ROUND_TRIP_SECONDS = {NodeKind.EDGE: 0.01, NodeKind.CLOUD: 0.05}
"""Before the first probe; the paper's Table II has 5-8 ms at the edge and 40-60 ms in the cloud."""

_DEFAULT_BITS_PER_SECOND = 50e6
"""Goodput assumed of a path nobody has measured; prompts are a few kilobytes."""

_DEFAULT_CHARACTERS_PER_TOKEN = 4.0
"""English under most tokenizers, until the node has counted with its own."""

_SMOOTHING_RATIO = 0.25
"""Weight of a new round trip in the moving average."""


# -- events ---------------------------------------------------------------------------------------


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
class RoundTripMeasured:
    """A probe came back."""

    node_id: NodeId
    seconds: float


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A request was claimed for a node."""

    node_id: NodeId
    request_id: RequestId
    model: ModelName
    work_seconds: float
    expected_tokens: float


@dataclass(frozen=True, slots=True)
class TokensStreamed:
    """A node made progress on a request."""

    node_id: NodeId
    request_id: RequestId
    tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A request is no longer at the node; the second end of a request changes nothing."""

    node_id: NodeId
    request_id: RequestId
    is_failure: bool


ProfilerEvent = (
    NodeConnected
    | NodeDisconnected
    | NodeForgotten
    | DrainChanged
    | ModelsReported
    | HealthReported
    | RoundTripMeasured
    | Dispatched
    | TokensStreamed
    | Ended
)


# -- state ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class NodeRecord:
    """What is known of one node.

    `last_seen_at` is the controller's monotonic receipt time. Each request that was ever claimed
    for the node is in flight, or counted once as completed or failed; those that were lost with
    the node have failed.
    """

    hello: NodeHello
    models: tuple[ReportedModel, ...]
    is_connected: bool
    is_draining: bool
    last_seen_at: float
    health: Health | None = None
    health_at: float | None = None
    round_trip_seconds: float | None = None
    completed_requests: int = 0
    failed_requests: int = 0
    requests: RequestMonitor = field(default_factory=RequestMonitor)

    @property
    def state(self) -> NodeState:
        """Derived, so that what is shown is what routing uses."""
        if not self.is_connected:
            return NodeState.OFFLINE
        if self.is_draining:
            return NodeState.DRAINING
        if any(is_routable(model) for model in self.models):
            return NodeState.READY
        return NodeState.LOADING


def is_routable(model: ReportedModel) -> bool:
    """Whether a model can be a destination: loaded, and its speed is known."""
    return model.phase is ModelPhase.READY and model.calibration is not None


class ProfilerState:
    """The profiler's state; `apply` is its only way in.

    Args:
        stale_seconds: a connected node whose last health sample is older takes nothing: stale
            means unknown, never idle.
    """

    def __init__(self, stale_seconds: float) -> None:
        self._stale_seconds = stale_seconds
        self._nodes: dict[NodeId, NodeRecord] = {}

    @property
    def nodes(self) -> dict[NodeId, NodeRecord]:
        """Records by node; to be read only."""
        return self._nodes

    def apply(self, event: ProfilerEvent, now: float) -> None:
        """Take in one event; events about unknown nodes are ignored, since they may cross."""
        match event:
            case NodeConnected(hello, is_draining):
                known = self._nodes.get(hello.node_id)
                record = NodeRecord(hello, hello.models, True, is_draining, now)
                if known is not None:
                    record.completed_requests = known.completed_requests
                    record.failed_requests = known.failed_requests + len(known.requests)
                self._nodes[hello.node_id] = record
            case NodeForgotten(node_id):
                self._nodes.pop(node_id, None)
            case _:
                found = self._nodes.get(event.node_id)
                if found is not None:
                    self._apply_to(found, event, now)

    def _apply_to(self, record: NodeRecord, event: ProfilerEvent, now: float) -> None:
        match event:
            case NodeDisconnected():
                record.is_connected = False
                record.health = record.health_at = record.round_trip_seconds = None
                record.failed_requests += record.requests.clear()
                return
            case DrainChanged(_, is_draining):
                record.is_draining = is_draining
                return
            case Dispatched(_, request_id, model, work_seconds, expected_tokens):
                record.requests.dispatched(request_id, model, work_seconds, expected_tokens, now)
                return
            case Ended(_, request_id, is_failure):
                if record.requests.ended(request_id):
                    record.completed_requests += not is_failure
                    record.failed_requests += is_failure
                return  # the controller may have ended it, which says nothing about the node
            case ModelsReported(_, models):
                record.models = models
            case HealthReported(_, health):
                record.health, record.health_at = health, now
            case RoundTripMeasured(_, seconds):
                old = record.round_trip_seconds
                record.round_trip_seconds = (
                    seconds if old is None else old + _SMOOTHING_RATIO * (seconds - old)
                )
            case TokensStreamed(_, request_id, tokens):
                record.requests.progressed(request_id, tokens, now)
            case NodeConnected() | NodeForgotten():  # handled by `apply`
                return
        record.last_seen_at = now

    def snapshot(self, now: float) -> ClusterSnapshot:
        """The fleet as one decision sees it."""
        nodes: list[Node] = []
        destinations: list[Destination] = []
        for node_id in sorted(self._nodes):
            record = self._nodes[node_id]
            kind = record.hello.attributes.kind
            nodes.append(
                Node(
                    node_id=node_id,
                    kind=kind,
                    state=record.state,
                    power=record.hello.attributes.power,
                    network=NetworkPath(
                        _DEFAULT_ROUND_TRIP_SECONDS[kind]
                        if record.round_trip_seconds is None
                        else record.round_trip_seconds,
                        _DEFAULT_BITS_PER_SECOND,
                        _DEFAULT_BITS_PER_SECOND,
                    ),
                    backlog_seconds=record.requests.backlog_seconds(now),
                    inflight_requests=len(record.requests),
                    refusal=self._refusal(record, now),
                )
            )
            destinations += [
                _destination(node_id, model)
                for model in sorted(record.models, key=lambda model: model.name)
                if is_routable(model)
            ]
        return ClusterSnapshot(tuple(nodes), tuple(destinations))

    def _refusal(self, record: NodeRecord, now: float) -> str | None:
        if record.state is not NodeState.READY:
            return f"node is {record.state.value}"
        if record.health_at is None:
            return "node has not reported its health yet"
        age = now - record.health_at
        if age > self._stale_seconds:
            return f"node's last health report is {age:.0f} s old"
        return None


def _destination(node_id: NodeId, model: ReportedModel) -> Destination:
    assert model.calibration is not None  # `is_routable` was asked
    return Destination(
        node_id=node_id,
        model=model.name,
        family=model.family,
        parameters_billions=model.parameters_billions,
        quantisation=model.quantisation,
        context_tokens=model.context_tokens,
        slots=model.slots,
        has_chat_template=model.has_chat_template,
        calibration=model.calibration,
        price=model.price,
        mean_quality_ratio=quality_prior(
            model.parameters_billions, model.quantisation, not model.is_base_model
        ),
        quality_source="prior",
        quality_count=0,
        characters_per_token=model.characters_per_token or _DEFAULT_CHARACTERS_PER_TOKEN,
    )
