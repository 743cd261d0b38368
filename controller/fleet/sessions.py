"""What happens when agents come, speak and go: the shell around registry, links and profiler."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from controller.config import FleetSettings, OrderSettings
from controller.domain.completion import Completion
from controller.domain.order import Order, OrderUpdate
from controller.fleet.convert import (
    COMPLETION,
    HEALTH,
    BadReportError,
    hello_from_proto,
    models_from_proto,
)
from controller.fleet.links import NodeLink, NodeLinks
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
from pointsman.convert import ORDER_UPDATE, order_to_proto
from pointsman.v1 import fleet_pb2

log = structlog.get_logger()

PROTOCOL_VERSIONS: Final = range(1, 2)
"""Versions of pointsman.v1's fleet conversation that this controller speaks."""


class RequestEvents(Protocol):
    """What happens at nodes to requests; each call returns at once."""

    def on_progress(
        self, node_id: NodeId, request_id: RequestId, attempt: int, text: str, tokens: int
    ) -> None:
        """A node made progress on a request."""
        ...

    def on_completion(
        self, node_id: NodeId, request_id: RequestId, attempt: int, completion: Completion
    ) -> bool:
        """A node's last word; whether it ends a request whose story is yet to be kept."""
        ...

    def on_node_lost(self, node_id: NodeId, why: str) -> None:
        """A node's session has ended."""
        ...


class IncompatibleVersionError(Exception):
    """The agent speaks no version of the protocol that this controller speaks."""


@dataclass(frozen=True, slots=True)
class _SentProbe:
    node_id: NodeId
    at: float
    size: ProbeSize


class FleetSessions:
    """Every connected agent. Belongs to the event loop; nothing here waits for a node.

    Args:
        registry: which sessions are current.
        links: what goes out to nodes.
        requests: hears what happens to requests.
        on_settled: hears of each node with numbered facts that wait to be kept; see `NodeLinks`.
    """

    def __init__(
        self,
        settings: FleetSettings,
        profiler: ProfilerState,
        registry: Registry,
        links: NodeLinks,
        requests: RequestEvents,
        on_settled: Callable[[NodeId], None],
        orders: OrderSettings | None = None,
    ) -> None:
        self._settings = settings
        self._profiler = profiler
        self._registry = registry
        self._links = links
        self._requests = requests
        self._on_settled = on_settled
        self._orders = OrderBook(orders or OrderSettings())
        self._probes: dict[int, _SentProbe] = {}
        self._next_number = 1

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
        self._links.add(link)
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
                self._requests.on_progress(
                    node_id,
                    RequestId(progress.request_id),
                    progress.attempt,
                    progress.text,
                    progress.tokens,
                )
            case "completion":
                completion = message.completion
                request_id = RequestId(completion.request_id)
                is_held = self._requests.on_completion(
                    node_id, request_id, completion.attempt, COMPLETION.read(completion)
                )
                if is_held and message.sequence:
                    self._links.hold(request_id, node_id, instance_id, message.sequence)
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
            self._on_settled(node_id)

    def disconnect(self, link: NodeLink, why: str) -> None:
        """The stream has ended; nothing happens when a newer session speaks for the node."""
        link.close(why)
        if self._registry.end(link.session_id, link.node_id):
            self._lose(link.node_id, why)

    def _lose(self, node_id: NodeId, why: str) -> None:
        self._links.remove(node_id, why)
        self._probes = {n: sent for n, sent in self._probes.items() if sent.node_id != node_id}
        self._profiler.apply(NodeDisconnected(node_id), time.monotonic())
        log.warning("node.lost", node_id=node_id, reason=why)
        self._orders.lost(node_id, why)
        self._requests.on_node_lost(node_id, why)

    # -- orders -----------------------------------------------------------------------------------

    def order(self, node_id: NodeId, order: Order) -> AsyncGenerator[OrderUpdate, None]:
        """Have a node do something with its models; see `OrderBook.follow`."""

        def send(order_id: str) -> bool:
            return self._links.send(node_id, order_to_proto(order_id, order))

        return self._orders.follow(node_id, order, send)

    def drain(self, node_id: NodeId, is_draining: bool) -> None:
        """Drain a node or lift it, also over its reconnects."""
        self._registry.set_draining(node_id, is_draining)
        self._profiler.apply(DrainChanged(node_id, is_draining), time.monotonic())
        order = fleet_pb2.DrainOrder(is_draining=is_draining)
        self._links.send(node_id, fleet_pb2.ConnectResponse(drain=order))

    # -- probes ------------------------------------------------------------------------------------

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
            for link in self._links:
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
        for link in self._links:
            link.close("the controller is stopping")
