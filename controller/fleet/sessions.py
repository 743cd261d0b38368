"""What happens when agents come, speak and go: the shell around registry, links and profiler."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from controller.config import FleetSettings, OrderSettings
from controller.domain.batch import Placement
from controller.domain.completion import Completion
from controller.domain.order import Order, OrderUpdate
from controller.domain.request import InferenceRequest
from controller.fleet.convert import (
    COMPLETION,
    HEALTH,
    BadReportError,
    hello_from_proto,
    models_from_proto,
    order_to_proto,
    work_order,
)
from controller.fleet.links import NodeLink
from controller.fleet.orders import OrderBook
from controller.fleet.registry import Registry
from controller.ids import NodeId, RequestId, SessionId
from controller.profiler.events import (
    DrainChanged,
    HealthReported,
    ModelsReported,
    NodeConnected,
    NodeDisconnected,
    ProbeReturned,
)
from controller.profiler.network_profiler import EMPTY_PROBE, ProbeSize
from controller.profiler.state import ProfilerState
from pointsman.convert import ORDER_UPDATE
from pointsman.v1 import fleet_pb2

log = structlog.get_logger()

PROTOCOL_VERSIONS: Final = range(1, 2)
"""Versions of pointsman.v1's fleet conversation that this controller speaks."""

OnProgress = Callable[[NodeId, RequestId, int, str, int], None]
OnCompletion = Callable[[NodeId, RequestId, int, Completion], bool]
"""Returns whether the completion ends a request whose story is yet to be kept."""
OnLost = Callable[[NodeId, str], None]


class IncompatibleVersionError(Exception):
    """The agent speaks no version of the protocol that this controller speaks."""


@dataclass(frozen=True, slots=True)
class _SentProbe:
    node_id: NodeId
    at: float
    size: ProbeSize


class FleetSessions:
    """Every connected agent. Belongs to the event loop; nothing here waits for a node.

    `on_progress`, `on_completion` and `on_lost` are set by the composition root, since the request
    manager and the fleet need each other.

    A numbered fact is acknowledged once what it brought is kept. `on_settled` is told of each node
    some of whose facts wait for that; whoever keeps things sets it, and calls `acknowledge` later.
    Where nobody does, facts are acknowledged as they come.
    """

    def __init__(
        self,
        settings: FleetSettings,
        profiler: ProfilerState,
        orders: OrderSettings | None = None,
    ) -> None:
        self._settings = settings
        self._profiler = profiler
        self._registry = Registry(settings.lease_seconds)
        self._orders = OrderBook(orders or OrderSettings())
        self._links: dict[NodeId, NodeLink] = {}
        self._probes: dict[int, _SentProbe] = {}
        self._held: dict[RequestId, tuple[NodeId, str, int]] = {}
        self._next_number = 1
        self.on_progress: OnProgress = lambda *_: None
        self.on_completion: OnCompletion = lambda *_: False
        self.on_lost: OnLost = lambda *_: None
        self.on_settled: Callable[[NodeId], None] = self._acknowledge_settled

    # -- agents -----------------------------------------------------------------------------------

    def connect(self, message: fleet_pb2.Hello) -> NodeLink:
        """Begin a session; an older one of the same node ends.

        Raises:
            IncompatibleVersionError: no common protocol version.
            BadReportError: the introduction cannot be.
        """
        version = min(message.max_protocol_version, PROTOCOL_VERSIONS[-1])
        if version < max(message.min_protocol_version, PROTOCOL_VERSIONS[0]):
            raise IncompatibleVersionError(
                f"the agent speaks protocol {message.min_protocol_version} to "
                f"{message.max_protocol_version}, this controller {PROTOCOL_VERSIONS[0]} to "
                f"{PROTOCOL_VERSIONS[-1]}; update the older of the two"
            )
        hello = hello_from_proto(message)
        now = time.monotonic()
        session_id = SessionId(f"{hello.node_id}-{self._next_number}")
        self._next_number += 1
        old = self._registry.begin(session_id, hello.node_id, hello.instance_id, now)
        if old is not None:
            self._lose(hello.node_id, "the agent connected again")
        link = NodeLink(hello.node_id, session_id)
        self._links[hello.node_id] = link
        is_draining = self._registry.is_draining(hello.node_id)
        self._profiler.apply(NodeConnected(hello, is_draining), now)
        link.send(
            fleet_pb2.ConnectResponse(
                welcome=fleet_pb2.Welcome(
                    protocol_version=version,
                    session_id=session_id,
                    health_interval_seconds=self._settings.health_interval_seconds,
                    lease_seconds=self._settings.lease_seconds,
                    is_draining=is_draining,
                    acked_sequence=self._registry.acked_sequence(hello.node_id, hello.instance_id),
                )
            )
        )
        self._probe(link)
        log.info(
            "node.connected",
            node_id=hello.node_id,
            hardware=hello.attributes.hardware,
            models=[model.name for model in hello.models],
        )
        return link

    def receive(self, link: NodeLink, message: fleet_pb2.ConnectRequest, instance_id: str) -> None:
        """Take in one message; of numbered repeats only what is kept is told again.

        Raises:
            BadReportError: it reports what cannot be.
        """
        if not self._registry.is_current(link.session_id, link.node_id):
            return
        now = time.monotonic()
        self._registry.renew(link.node_id, now)
        node_id = link.node_id
        if message.sequence and not self._registry.accept(node_id, instance_id, message.sequence):
            acked = self._registry.acked_sequence(node_id, instance_id)
            link.send(fleet_pb2.ConnectResponse(acked_sequence=acked))
            return
        is_held = False
        match message.WhichOneof("message"):
            case "health":
                self._profiler.apply(HealthReported(node_id, HEALTH.read(message.health)), now)
            case "models":
                models = models_from_proto(message.models.models)
                self._profiler.apply(ModelsReported(node_id, models), now)
            case "progress":
                progress = message.progress
                self.on_progress(
                    node_id,
                    RequestId(progress.request_id),
                    progress.attempt,
                    progress.text,
                    progress.tokens,
                )
            case "completion":
                completion = message.completion
                request_id = RequestId(completion.request_id)
                is_held = self.on_completion(
                    node_id, request_id, completion.attempt, COMPLETION.read(completion)
                )
                if is_held and message.sequence:
                    self.settle(request_id)  # of an attempt elsewhere, whose node was lost
                    self._registry.hold(node_id, message.sequence)
                    self._held[request_id] = (node_id, instance_id, message.sequence)
            case "probe_echo":
                self._echoed(node_id, message.probe_echo, now)
            case "order_update":
                self._orders.updated(node_id, ORDER_UPDATE.read(message.order_update))
            case "goodbye":
                # It finishes what it has; the stream ends when it is done.
                self._profiler.apply(DrainChanged(node_id, True), now)
                log.info("node.leaving", node_id=node_id, reason=message.goodbye.reason)
            case "hello":
                raise BadReportError("a second Hello in one session")
            case _:
                pass  # a newer agent's message; unknown fields are ignored by design
        if message.sequence and not is_held:
            self.on_settled(node_id)

    def disconnect(self, link: NodeLink, why: str) -> None:
        """The stream has ended; nothing happens when a newer session speaks for the node."""
        link.close(why)
        if self._registry.end(link.session_id, link.node_id):
            self._lose(link.node_id, why)

    def _lose(self, node_id: NodeId, why: str) -> None:
        link = self._links.pop(node_id, None)
        if link is not None:
            link.close(why)
        self._probes = {n: sent for n, sent in self._probes.items() if sent.node_id != node_id}
        self._profiler.apply(NodeDisconnected(node_id), time.monotonic())
        log.warning("node.lost", node_id=node_id, reason=why)
        self._orders.lost(node_id, why)
        self.on_lost(node_id, why)

    # -- orders -----------------------------------------------------------------------------------

    def send_work(
        self,
        node_id: NodeId,
        request: InferenceRequest,
        attempt: int,
        placement: Placement,
        time_limit_seconds: float,
    ) -> bool:
        """Send a request to its node; False when the node is not there."""
        link, chosen = self._links.get(node_id), placement.chosen
        if link is None or chosen is None:
            return False
        order = work_order(request, attempt, chosen.model, time_limit_seconds)
        return link.send(fleet_pb2.ConnectResponse(work=order))

    def send_cancel(self, node_id: NodeId, request_id: RequestId, attempt: int) -> None:
        """Tell a node to stop; a node that is gone has stopped already."""
        link = self._links.get(node_id)
        if link is not None:
            cancel = fleet_pb2.CancelWork(request_id=request_id, attempt=attempt)
            link.send(fleet_pb2.ConnectResponse(cancel=cancel))

    def order(self, node_id: NodeId, order: Order) -> AsyncGenerator[OrderUpdate, None]:
        """Have a node do something with its models; see `OrderBook.follow`."""

        def send(order_id: str) -> bool:
            link = self._links.get(node_id)
            return link is not None and link.send(order_to_proto(order_id, order))

        return self._orders.follow(node_id, order, send)

    def drain(self, node_id: NodeId, is_draining: bool) -> None:
        """Drain a node or lift it, also over its reconnects."""
        self._registry.set_draining(node_id, is_draining)
        self._profiler.apply(DrainChanged(node_id, is_draining), time.monotonic())
        link = self._links.get(node_id)
        if link is not None:
            order = fleet_pb2.DrainOrder(is_draining=is_draining)
            link.send(fleet_pb2.ConnectResponse(drain=order))

    # -- what outlives the controller -------------------------------------------------------------

    def restore(
        self, node_id: NodeId, is_draining: bool, instance_id: str, acked_sequence: int
    ) -> None:
        """Take up what an earlier controller knew of a node, before it connects."""
        self._registry.set_draining(node_id, is_draining)
        if acked_sequence:
            self._registry.accept(node_id, instance_id, acked_sequence)
            self._registry.keep(node_id, instance_id, acked_sequence)

    def is_draining(self, node_id: NodeId) -> bool:
        """Whether an operator drains this node."""
        return self._registry.is_draining(node_id)

    def settle(self, request_id: RequestId) -> NodeId | None:
        """The story of a request has been handed over to be kept; the node whose fact that was."""
        held = self._held.pop(request_id, None)
        if held is None:
            return None
        self._registry.settle(*held)
        return held[0]

    def last_settled(self, node_id: NodeId) -> tuple[str, int]:
        """The start of the agent that spoke last, and up to which fact all of it is settled."""
        return self._registry.last_settled(node_id)

    def acknowledge(self, node_id: NodeId, instance_id: str, sequence: int) -> None:
        """Everything up to this fact is kept: the node may forget it."""
        link = self._links.get(node_id)
        if self._registry.keep(node_id, instance_id, sequence) and link is not None:
            link.send(fleet_pb2.ConnectResponse(acked_sequence=sequence))

    def _acknowledge_settled(self, node_id: NodeId) -> None:
        self.acknowledge(node_id, *self._registry.last_settled(node_id))

    def _probe(self, link: NodeLink, size: ProbeSize = EMPTY_PROBE) -> None:
        number = self._next_number
        self._next_number += 1
        probe = fleet_pb2.Probe(
            nonce=number, padding=bytes(size.padding_bytes), echo_bytes=size.echo_bytes
        )
        self._probes[number] = _SentProbe(link.node_id, time.monotonic(), size)
        link.send(fleet_pb2.ConnectResponse(probe=probe))

    def _echoed(self, node_id: NodeId, echo: fleet_pb2.ProbeEcho, now: float) -> None:
        sent = self._probes.pop(echo.nonce, None)
        if sent is None or sent.node_id != node_id:
            return
        if sent.size.echo_bytes and len(echo.padding) < sent.size.echo_bytes:
            return  # an agent that knows no echo_bytes; it says nothing about the way back
        self._profiler.apply(ProbeReturned(node_id, now - sent.at, sent.size), now)

    # -- time -------------------------------------------------------------------------------------

    async def watch_leases(self) -> None:
        """End the sessions of silent nodes, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.lease_seconds / 8)
            for session in self._registry.expired(time.monotonic()):
                link = self._links.get(session.node_id)
                if link is not None:
                    self.disconnect(
                        link, f"nothing was heard for {self._settings.lease_seconds:g} s"
                    )

    async def probe_paths(self) -> None:
        """Measure every node's round trip now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.probe_interval_seconds)
            outstanding = {sent.node_id for sent in self._probes.values()}
            for link in list(self._links.values()):
                if link.node_id not in outstanding:
                    self._probe(link, self._size_of_probe(link.node_id))

    def _size_of_probe(self, node_id: NodeId) -> ProbeSize:
        """Mostly nothing; padding now and then, when nobody is in the way of it."""
        record = self._profiler.nodes.get(node_id)
        if record is None:
            return EMPTY_PROBE
        is_idle = not len(record.requests) and not self._orders.is_busy(node_id)
        return record.path.next_probe(
            is_idle, self._settings.goodput_interval_seconds, time.monotonic()
        )

    def close(self) -> None:
        """End every session."""
        for link in list(self._links.values()):
            link.close("the controller is stopping")
