"""Everything the router knows about the fleet: events in, one snapshot out.

The parts that think are beside this module: `request_monitor`, `network_profiler`, `node_profiler`
and `calibration`.
"""

import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from controller.domain.cluster import (
    Calibration,
    ClusterSnapshot,
    Destination,
    Node,
    NodeState,
    SessionPrefix,
)
from controller.domain.completion import Usage
from controller.domain.engine_speed import CHUNK_SECONDS, decode_step, for_slots
from controller.domain.hardware import DeviceClass, device_class
from controller.domain.known_calibration import CalibrationKey, KnownCalibration
from controller.domain.node_report import Health, ModelPhase, NodeHello, ReportedModel
from controller.ids import ModelName, NodeId, RequestId
from controller.profiler.answer_length import AnswerLengths
from controller.profiler.calibration import DecodeSample, EnergySample, PrefillSample, SpeedEstimate
from controller.profiler.destinations import DestinationViews, with_claims
from controller.profiler.events import (
    DrainChanged,
    HealthReported,
    ModelsReported,
    NodeConnected,
    NodeDisconnected,
    NodeForgotten,
    ProbeReturned,
    ProfilerEvent,
    RequestDispatched,
    RequestEnded,
    TokensStreamed,
)
from controller.profiler.network_profiler import PathEstimate
from controller.profiler.node_profiler import believed_seconds, refusal
from controller.profiler.request_monitor import DecodeSeen, PrefillSeen, RequestMonitor

_TRUSTED_COMPLETIONS: Final = 20
"""A remembered calibration that rests on so many completions is better than a node's own one."""

_MAX_SESSIONS: Final = 10_000
_MAX_REMEMBERED: Final = 10_000
_FIRST_HIT_RATIO: Final = 0.5
_HIT_WEIGHT: Final = 0.3
_OVERHEAD_WINDOW: Final = 31
_GREATEST_OVERHEAD_SECONDS: Final = 2.0
_GREATEST_EXTRA_TOKENS: Final = 400.0


@dataclass(frozen=True, slots=True)
class _SpeedKey:
    """One estimate of a node: what it holds for, and the engine's shape."""

    key: CalibrationKey
    slots: int


@dataclass(slots=True)
class _Speed:
    """An estimate, and what the node had reported when it began.

    `confirmed_at` is when it was measured again or last moved by a completion; None until then.
    """

    reported: Calibration | None
    estimate: SpeedEstimate
    confirmed_at: float | None = None


@dataclass(slots=True)
class _ModelStory:
    """What completions taught of one model on one node, beside its speed."""

    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    extra_tokens: deque[float] = field(default_factory=lambda: deque(maxlen=_OVERHEAD_WINDOW))
    extra_prompt_tokens: float = 0.0
    hit_ratio: float = _FIRST_HIT_RATIO


@dataclass(frozen=True, slots=True)
class _Sent:
    """What has to be remembered of a dispatch until it ends."""

    model: ModelName
    prompt_tokens: float
    at: float


@dataclass(slots=True)
class NodeRecord:
    """What is known of one node.

    `last_seen_at` is the controller's monotonic receipt time. Each request that was ever claimed
    for the node is in flight, or counted once as completed, failed or cancelled; those that were
    lost with the node have failed.
    """

    hello: NodeHello
    models: tuple[ReportedModel, ...]
    is_connected: bool
    is_draining: bool
    last_seen_at: float
    path: PathEstimate
    health: Health | None = None
    health_at: float | None = None
    completed_requests: int = 0
    failed_requests: int = 0
    cancelled_requests: int = 0
    requests: RequestMonitor = field(default_factory=RequestMonitor)
    overheads: deque[float] = field(default_factory=lambda: deque(maxlen=_OVERHEAD_WINDOW))
    overhead_seconds: float = 0.0
    stories: dict[ModelName, _ModelStory] = field(default_factory=dict)
    _speeds: dict[_SpeedKey, _Speed] = field(default_factory=dict)
    _sent: dict[RequestId, _Sent] = field(default_factory=dict)
    _loaded: tuple[tuple[ReportedModel, SpeedEstimate], ...] | None = None
    destinations: DestinationViews = field(default_factory=DestinationViews)

    @property
    def state(self) -> NodeState:
        """Derived, so that what is shown is what routing uses."""
        if not self.is_connected:
            return NodeState.OFFLINE
        if self.is_draining:
            return NodeState.DRAINING
        if self.loaded:
            return NodeState.READY
        return NodeState.LOADING

    @property
    def round_trip_seconds(self) -> float | None:
        """As measured; None until then."""
        return self.path.round_trip_seconds

    @property
    def loaded(self) -> tuple[tuple[ReportedModel, SpeedEstimate], ...]:
        """The models that can be destinations, in order of name."""
        if self._loaded is None:
            found = [
                (model, self._speeds[self._speed_key(model)].estimate)
                for model in sorted(self.models, key=lambda model: model.name)
                if self.is_routable(model)
            ]
            self._loaded = tuple(found)
        return self._loaded

    def models_changed(self) -> None:
        """Models, estimates or what they are estimated for are others now."""
        self._loaded = None
        self.destinations.forget()

    def is_routable(self, model: ReportedModel) -> bool:
        """Whether a model can be a destination: loaded, and its speed is known."""
        return model.phase is ModelPhase.READY and self._speed_key(model) in self._speeds

    def calibration_of(self, model: ReportedModel) -> Calibration | None:
        """The speeds that predictions use now; None while nobody has measured any."""
        speed = self._speeds.get(self._speed_key(model))
        return None if speed is None else speed.estimate.calibration()

    @property
    def models_now(self) -> tuple[ReportedModel, ...]:
        """The models with the speeds that predictions use now, not those that were reported."""
        return tuple(
            replace(model, calibration=self.calibration_of(model)) for model in self.models
        )

    def health_age_seconds(self, now: float) -> float | None:
        """Time since the last health sample arrived; None if none has since it connected."""
        return None if self.health_at is None else now - self.health_at

    def speed_age_seconds(self, model: ReportedModel, now: float) -> float | None:
        """Time since this speed was measured again or a completion moved it; None if never.

        What a node brings with it may have been measured on any earlier day.
        """
        speed = self._speeds.get(self._speed_key(model))
        return None if speed is None or speed.confirmed_at is None else now - speed.confirmed_at

    def key_of(self, model: ReportedModel) -> CalibrationKey:
        """What a speed of this model holds for."""
        attributes = self.hello.attributes
        # Without a file's digest the name has to do; it is never taken for another's.
        return CalibrationKey(
            attributes.hardware,
            model.digest or f"name:{model.name}",
            attributes.engine_version,
            "" if self.health is None else self.health.power_mode,
        )

    def _speed_key(self, model: ReportedModel) -> _SpeedKey:
        return _SpeedKey(self.key_of(model), model.slots)

    def _speed_of(self, model_name: ModelName) -> _Speed | None:
        for model in self.models:
            if model.name == model_name:
                return self._speeds.get(self._speed_key(model))
        return None

    def story_of(self, model: ModelName) -> _ModelStory:
        """What completions taught of this model; begun when there is none."""
        return self.stories.setdefault(model, _ModelStory())


class ProfilerState:
    """The profiler's state; `apply` is its only way in.

    Args:
        stale_seconds: a connected node whose last health sample is older takes nothing: stale
            means unknown, never idle.
    """

    def __init__(self, stale_seconds: float) -> None:
        self._stale_seconds = stale_seconds
        self._nodes: dict[NodeId, NodeRecord] = {}
        self._remembered: OrderedDict[CalibrationKey, KnownCalibration] = OrderedDict()
        self._sessions: OrderedDict[str, tuple[NodeId, ModelName, int]] = OrderedDict()
        self._fleet: tuple[object, ...] = ()
        self._fleet_version = 0
        self._events: Counter[type] = Counter()

    @property
    def nodes(self) -> dict[NodeId, NodeRecord]:
        """Records by node; to be read only."""
        return self._nodes

    @property
    def events(self) -> dict[str, int]:
        """How many events of each kind have come, by the name of its class."""
        return {
            kind.__name__.removeprefix("Request"): count for kind, count in self._events.items()
        }

    # -- calibrations that outlive their nodes ----------------------------------------------------

    def remember(self, known: Iterable[KnownCalibration]) -> None:
        """Take in calibrations of earlier days, before the nodes come back."""
        for one in known:
            self._remembered[one.key] = one
            self._remembered.move_to_end(one.key)
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def known_calibrations(self) -> list[KnownCalibration]:
        """Everything worth remembering, the current beliefs about connected nodes included."""
        current = [one for record in self._nodes.values() for one in _known_speeds(record)]
        # Of machines that are alike, the one that has worked most knows best.
        self.remember(sorted(current, key=lambda one: one.completions))
        return list(self._remembered.values())

    def restore(
        self, hello: NodeHello, completed: int, failed: int, cancelled: int, now: float
    ) -> None:
        """Take in a node of earlier days; it is offline until it comes, and its models idle."""
        attributes = hello.attributes
        path = PathEstimate(attributes.kind, attributes.is_link_metered)
        record = NodeRecord(hello, hello.models, False, False, now, path)
        record.completed_requests = completed
        record.failed_requests = failed
        record.cancelled_requests = cancelled
        self._nodes.setdefault(hello.node_id, record)

    # -- events in --------------------------------------------------------------------------------

    def apply(self, event: ProfilerEvent, now: float) -> None:
        """Take in one event; events about unknown nodes are ignored, since they may cross."""
        self._events[type(event)] += 1
        match event:
            case NodeConnected(hello, is_draining):
                self._connect(hello, is_draining, now)
            case NodeForgotten(node_id):
                self._nodes.pop(node_id, None)
            case _:
                found = self._nodes.get(event.node_id)
                if found is not None:
                    self._apply_to(found, event, now)

    def _connect(self, hello: NodeHello, is_draining: bool, now: float) -> None:
        known = self._nodes.get(hello.node_id)
        attributes = hello.attributes
        path = PathEstimate(attributes.kind, attributes.is_link_metered)
        record = NodeRecord(hello, hello.models, True, is_draining, now, path)
        if known is not None:
            self.remember(_known_speeds(known))
            record.completed_requests = known.completed_requests
            record.failed_requests = known.failed_requests + len(known.requests)
            record.cancelled_requests = known.cancelled_requests
            record.stories, record._speeds = known.stories, known._speeds
            record.overheads = known.overheads
            record.overhead_seconds = known.overhead_seconds
        self._nodes[hello.node_id] = record
        self._refresh_speeds(record, now)

    def _apply_to(self, record: NodeRecord, event: ProfilerEvent, now: float) -> None:
        match event:
            case NodeDisconnected():
                self.remember(_known_speeds(record))
                record.is_connected = False
                record.health = record.health_at = None
                attributes = record.hello.attributes
                record.path = PathEstimate(attributes.kind, attributes.is_link_metered)
                record.failed_requests += record.requests.clear()
                record._sent.clear()
                record.models_changed()
                return
            case DrainChanged(_, is_draining):
                record.is_draining = is_draining
                return
            case RequestDispatched():
                self._dispatched(record, event, now)
                return
            case RequestEnded():
                self._ended(record, event, now)
                return  # the controller may have ended it, which says nothing about the node
            case ModelsReported(_, models):
                record.models = models
                self._refresh_speeds(record, now)
            case HealthReported(_, health):
                has_new_mode = (
                    record.health is None or record.health.power_mode != health.power_mode
                )
                record.health, record.health_at = health, now
                if has_new_mode:
                    self._refresh_speeds(record, now)
                for speed in record._speeds.values():
                    speed.estimate.set_throttled(bool(health.is_throttled))
            case ProbeReturned(_, seconds, size):
                record.path.probed(size, seconds, now)
            case TokensStreamed(_, request_id, tokens):
                seen = record.requests.progressed(request_id, tokens, now)
                if seen is not None:
                    self._learn_prefill(record, seen)
            case NodeConnected() | NodeForgotten():  # handled by `apply`
                return
        record.last_seen_at = now

    def _dispatched(self, record: NodeRecord, event: RequestDispatched, now: float) -> None:
        if record.requests.is_in_flight(event.request_id):
            record.failed_requests += 1  # the earlier claim can end no more
        claim = event.claim
        record.requests.dispatched(event.request_id, claim, now)
        record._sent[event.request_id] = _Sent(claim.model, claim.prompt_tokens, now)

    def _ended(self, record: NodeRecord, event: RequestEnded, now: float) -> None:
        if not record.requests.is_in_flight(event.request_id):
            return
        seen = record.requests.ended(event.request_id, now)
        sent = record._sent.pop(event.request_id)
        if event.is_failure:
            record.failed_requests += 1
        elif event.is_cancelled:
            record.cancelled_requests += 1
        else:
            record.completed_requests += 1
            if event.usage is not None:
                self._learn(record, event, event.usage, sent, seen, now)

    # -- what completions teach -------------------------------------------------------------------

    def _learn(
        self,
        record: NodeRecord,
        event: RequestEnded,
        usage: Usage,
        sent: _Sent,
        seen: DecodeSeen | None,
        now: float,
    ) -> None:
        story = record.story_of(sent.model)
        story.lengths.observe(usage.completion_tokens, event.was_cut)
        self._learn_session(event, usage, sent.model, record.hello.node_id, story)
        if usage.prompt_tokens > 0 and sent.prompt_tokens > 0:
            extra = story.extra_prompt_tokens + usage.prompt_tokens - sent.prompt_tokens
            if not usage.cached_prompt_tokens and abs(extra) <= _GREATEST_EXTRA_TOKENS:
                story.extra_tokens.append(extra)
                story.extra_prompt_tokens = statistics.median(story.extra_tokens)
        engine_seconds = usage.queue_seconds + usage.prefill_seconds + usage.decode_seconds
        outside = now - sent.at - engine_seconds - record.path.path(now).round_trip_seconds
        if engine_seconds > 0.0 and outside <= _GREATEST_OVERHEAD_SECONDS:
            record.overheads.append(max(outside, 0.0))
            record.overhead_seconds = statistics.median(record.overheads)
        speed = record._speed_of(sent.model)
        if speed is None or seen is None:
            return
        speed.confirmed_at, estimate = now, speed.estimate
        read_tokens = usage.prompt_tokens - usage.cached_prompt_tokens
        estimate.observe_energy(
            EnergySample(
                read_tokens, usage.prefill_joules, usage.completion_tokens, usage.decode_joules
            )
        )
        if seen.was_alone_in_prefill:
            self._learn_prefill(
                record,
                PrefillSeen(
                    sent.model,
                    read_tokens,
                    usage.prefill_seconds,
                    seen.decoding_in_prefill,
                    seen.prefill_busy_models,
                ),
            )
        share = _machine_share(estimate.calibration(), seen.mean_busy_models)
        estimate.observe_decode(
            DecodeSample(
                usage.completion_tokens - 1,
                usage.decode_seconds * (1.0 - seen.prefill_ratio) / share,
                seen.mean_sequences,
            )
        )

    def _learn_prefill(self, record: NodeRecord, seen: PrefillSeen) -> None:
        speed = record._speed_of(seen.model)
        if speed is None:
            return
        estimate = speed.estimate
        speeds = estimate.calibration()
        seconds = seen.seconds / _machine_share(speeds, seen.mean_busy_models)
        if seen.mean_decoding > 0.05:
            fixed, each = decode_step(speeds, speeds.measured_slots)
            step = (fixed + each * seen.mean_decoding) * min(seen.mean_decoding, 1.0)
            seconds *= CHUNK_SECONDS / (CHUNK_SECONDS + step)
        estimate.observe_prefill(PrefillSample(seen.tokens, seconds))

    def _learn_session(
        self,
        event: RequestEnded,
        usage: Usage,
        model: ModelName,
        node_id: NodeId,
        story: _ModelStory,
    ) -> None:
        if not event.session_id:
            return
        before = self._sessions.get(event.session_id)
        if before is not None and before[:2] == (node_id, model) and before[2] > 0:
            possible = min(before[2], usage.prompt_tokens)
            if possible > 0:
                hit = min(usage.cached_prompt_tokens / possible, 1.0)
                story.hit_ratio += _HIT_WEIGHT * (hit - story.hit_ratio)
        tokens = usage.prompt_tokens + usage.completion_tokens
        self._sessions[event.session_id] = (node_id, model, tokens)
        self._sessions.move_to_end(event.session_id)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def _refresh_speeds(self, record: NodeRecord, now: float) -> None:
        """Begin an estimate for each model of a known speed that has none, or a newer measurement.

        One that goes on keeps what it has learnt. A model that is being measured keeps its old
        estimate, too.
        """
        for model in record.models:
            key = record._speed_key(model)
            current = record._speeds.get(key)
            reported = model.calibration
            if current is not None and (reported is None or current.reported == reported):
                continue
            remembered = self._remembered.get(key.key)
            base = reported
            is_first = current is None
            if remembered is not None and (
                reported is None or (is_first and remembered.completions >= _TRUSTED_COMPLETIONS)
            ):
                base = remembered.calibration
            if base is None:
                continue
            estimate = SpeedEstimate(for_slots(base, model.slots), model.slots)
            if record.health is not None:
                estimate.set_throttled(bool(record.health.is_throttled))
            record._speeds[key] = _Speed(reported, estimate, None if is_first else now)
        record.models_changed()

    # -- what goes out ----------------------------------------------------------------------------

    def inflight_requests(self) -> int:
        """Claims of the whole fleet that have not ended."""
        return sum(len(record.requests) for record in self._nodes.values())

    def routable_destinations(self, now: float) -> int:
        """Destinations that would take work now; cheaper than a snapshot."""
        believed = self._believed_seconds(now)
        return sum(
            len(record.loaded)
            for record in self._nodes.values()
            if refusal(record.state, _age(record, now), believed) is None
        )

    def snapshot(self, now: float, session_ids: Sequence[str] = ()) -> ClusterSnapshot:
        """The fleet as one decision sees it.

        Args:
            session_ids: conversations whose last turn matters; empty ones are ignored.
        """
        nodes: list[Node] = []
        destinations: list[Destination] = []
        idle_destinations: list[Destination] = []
        believed = self._believed_seconds(now)
        for node_id in sorted(self._nodes):
            record = self._nodes[node_id]
            attributes, requests = record.hello.attributes, record.requests
            in_flight = requests.in_flight(now) if len(requests) else ()
            nodes.append(
                Node(
                    node_id=node_id,
                    kind=attributes.kind,
                    state=record.state,
                    power=attributes.power,
                    network=record.path.path(now),
                    backlog_seconds=requests.backlog_seconds(now),
                    inflight_requests=len(requests),
                    refusal=refusal(record.state, _age(record, now), believed),
                    paper_backlog_seconds=requests.paper.at(now),
                    in_flight=in_flight,
                    overhead_seconds=record.overhead_seconds,
                    receive_usd_per_byte=attributes.receive_usd_per_byte,
                    transmit_usd_per_byte=attributes.transmit_usd_per_byte,
                    device=_device(record),
                )
            )
            for model, estimate in record.loaded:
                story = record.stories.get(model.name)
                idle = record.destinations.idle(
                    node_id,
                    model,
                    estimate.calibration(),
                    None if story is None else story.lengths.curve,
                    0.0 if story is None else story.extra_prompt_tokens,
                )
                idle_destinations.append(idle)
                destinations.append(with_claims(idle, in_flight) if in_flight else idle)
        fleet = tuple([node.node_id for node in nodes]), tuple(idle_destinations)
        if fleet != self._fleet:  # mostly the same objects, which takes microseconds
            self._fleet, self._fleet_version = fleet, self._fleet_version + 1
        return ClusterSnapshot(
            tuple(nodes),
            tuple(destinations),
            {found[0]: found[1] for found in map(self._session, session_ids) if found is not None},
            self._fleet_version,
        )

    def _session(self, session_id: str) -> tuple[str, SessionPrefix] | None:
        if not session_id or session_id not in self._sessions:
            return None
        node_id, model, tokens = self._sessions[session_id]
        record = self._nodes.get(node_id)
        if record is None or not record.is_connected:
            return None
        return session_id, SessionPrefix(node_id, model, tokens, record.story_of(model).hit_ratio)

    def _believed_seconds(self, now: float) -> float:
        ages = [_age(record, now) for record in self._nodes.values() if record.is_connected]
        return believed_seconds(ages, self._stale_seconds)


def _known_speeds(record: NodeRecord) -> list[KnownCalibration]:
    """What is worth remembering of a node.

    A hot afternoon is no property of its hardware; and what was measured in another power mode only
    stands in until the node has measured this one.
    """
    return [
        KnownCalibration(key.key, speed.estimate.calibration(), speed.estimate.completions)
        for key, speed in record._speeds.items()
        if not speed.estimate.is_throttled
        and speed.estimate.base.power_mode in ("", key.key.power_mode)
    ]


def _age(record: NodeRecord, now: float) -> float | None:
    return None if record.health_at is None else now - record.health_at


def _machine_share(speeds: Calibration, busy_models: float) -> float:
    """How many times longer everything takes while so many models of the node are busy."""
    return max(1.0, speeds.utilisation_ratio * busy_models)


def _device(record: NodeRecord) -> DeviceClass:
    attributes, health = record.hello.attributes, record.health
    has_gpu = health is not None and health.gpu_utilisation_ratio is not None
    return device_class(attributes.hardware, attributes.cpu_cores, attributes.memory_bytes, has_gpu)
