"""The stream to the controller: introduces the node, keeps the lease, reconnects for ever."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from edge_agent.config import ControllerSettings
from edge_agent.errors import UsageError
from edge_agent.link.backoff import Backoff
from edge_agent.link.convert import (
    completion_to_proto,
    work_from_proto,
)
from edge_agent.link.outbox import Outbox
from edge_agent.serving.completion import Completion
from edge_agent.serving.orders import GivenOrder, Order, OrderDesk, OrderPhase, OrderUpdate
from edge_agent.serving.work import WorkDesk
from pointsman.convert import ORDER_UPDATE, order_from_proto
from pointsman.v1 import fleet_pb2, fleet_pb2_grpc

log = structlog.get_logger()

PROTOCOL_VERSION_MIN: Final = 1
PROTOCOL_VERSION_MAX: Final = 1

_WELCOME_SECONDS: Final = 10.0
_MAX_ECHO_BYTES: Final = 1 << 20

_OPTIONS: Final = (
    # The server permits pings this frequent (grpc_server.py); together with the lease they find a
    # half-open stream (case G2).
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


@dataclass(frozen=True, slots=True)
class Introduction:
    """What the node says of itself when it connects."""

    node_id: str
    instance_id: str
    attributes: Callable[[], fleet_pb2.StaticAttributes]
    models: Callable[[], list[fleet_pb2.ModelState]]
    health: Callable[[], fleet_pb2.HealthSample]


class LinkSession:
    """Keeps one stream to the controller open. Belongs to the event loop.

    Progress is merged while the stream is slow, so what waits to be sent is bounded by the text of
    the running answers; completions wait in the outbox until they are acknowledged.

    Args:
        rng: for the jitter of reconnects.
        orders: carries out orders about models; None refuses them.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        introduction: Introduction,
        desk: Callable[[], WorkDesk],
        rng: random.Random,
        backoff: Backoff | None = None,
        orders: Callable[[], OrderDesk] | None = None,
    ) -> None:
        self._settings = settings
        self._introduction = introduction
        self._desk = desk
        self._rng = rng
        self._backoff = backoff or Backoff()
        self._orders = orders
        self._outbox: Outbox[fleet_pb2.ConnectRequest] = Outbox()
        self._unsent_facts: list[fleet_pb2.ConnectRequest] = []
        self._order_updates: dict[str, fleet_pb2.OrderUpdate] = {}
        self._progress: dict[tuple[str, int], tuple[list[str], int]] = {}
        self._urgent: list[fleet_pb2.ConnectRequest] = []
        self._has_models = False
        self._something = asyncio.Event()
        self._health_seconds = 1.0
        self._connected_at: float | None = None
        self._last_error: str | None = f"no answer from {settings.address} yet"

    @property
    def is_connected(self) -> bool:
        """Whether the controller has welcomed this session."""
        return self._connected_at is not None

    @property
    def connected_seconds(self) -> float | None:
        """How long this session has lasted; None while there is none."""
        return None if self._connected_at is None else time.monotonic() - self._connected_at

    @property
    def last_error(self) -> str | None:
        """Why the last attempt failed; None once connected."""
        return self._last_error

    @property
    def unacknowledged_completions(self) -> int:
        """Completions, and ends of orders, that the controller has not confirmed."""
        return len(self._outbox)

    # -- what the agent has to say ----------------------------------------------------------------

    def progressed(self, request_id: str, attempt: int, text: str, tokens: int) -> None:
        """Tokens came; dropped while there is no session, since the request ends with it."""
        if not self.is_connected:
            return
        pieces, count = self._progress.get((request_id, attempt), ([], 0))
        if text:
            pieces.append(text)
        self._progress[request_id, attempt] = (pieces, count + tokens)
        self._something.set()

    def completed(self, completion: Completion) -> None:
        """An order ended; kept until the controller has it."""
        self._keep(fleet_pb2.ConnectRequest(completion=completion_to_proto(completion)))

    def order_updated(self, update: OrderUpdate) -> None:
        """An order goes on, of which only the latest word is sent, or has ended, which is kept."""
        message = ORDER_UPDATE.write(update)
        if update.is_last:
            self._order_updates.pop(update.order_id, None)
            self._keep(fleet_pb2.ConnectRequest(order_update=message))
        elif self.is_connected:
            self._order_updates[update.order_id] = message
            self._something.set()

    def _keep(self, fact: fleet_pb2.ConnectRequest) -> None:
        fact.sequence = self._outbox.add(fact)
        self._unsent_facts.append(fact)
        self._something.set()

    def models_changed(self) -> None:
        """The models' list is sent again."""
        self._has_models = True
        self._something.set()

    async def say_goodbye(self, reason: str, seconds: float) -> None:
        """Tell the controller that this node takes nothing new; waits for nothing else."""
        if self.is_connected:
            goodbye = fleet_pb2.Goodbye(reason=reason)
            self._urgent.append(fleet_pb2.ConnectRequest(goodbye=goodbye))
            self._something.set()
            deadline = time.monotonic() + seconds
            while self._urgent and self.is_connected and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # only while stopping, so a poll will do

    async def flush(self, seconds: float) -> None:
        """Wait until the controller has every fact, for at most this long."""
        await self._wait_until(lambda: not len(self._outbox), seconds)

    async def _wait_until(self, is_done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        # Only while stopping, so a poll will do.
        while not is_done() and self.is_connected and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    # -- the stream -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, serve, and connect again, until cancelled."""
        failures = 0
        while True:
            try:
                await self._serve_once()
            except grpc.aio.AioRpcError as error:
                self._last_error = _explain(error, self._settings)
            except (OSError, asyncio.TimeoutError, _StreamEndedError) as error:
                self._last_error = str(error) or type(error).__name__
            except Exception as error:  # whatever it was, the node comes back by itself (case L1)
                log.exception("link.crashed")
                self._last_error = f"the link failed inside the agent: {type(error).__name__}"
            failures = 1 if self._connected_at is not None else failures + 1
            was_connected = self._connected_at is not None
            self._connected_at = None
            self._progress.clear()
            self._desk().cancel_all()
            delay = self._backoff.delay_seconds(failures, self._rng)
            log.warning(
                "link.lost" if was_connected else "link.failed",
                reason=self._last_error,
                retry_seconds=round(delay, 2),
            )
            await asyncio.sleep(delay)

    async def _serve_once(self) -> None:
        async with self._channel() as channel:
            stub: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
            call = stub.Connect()  # fails at once, with the reason, when nobody is there
            try:
                try:
                    first = await asyncio.wait_for(self._introduce(call), _WELCOME_SECONDS)
                except asyncio.TimeoutError as error:
                    raise _StreamEndedError(
                        f"{self._settings.address} gave no answer within {_WELCOME_SECONDS:g} s"
                    ) from error
                if not isinstance(first, fleet_pb2.ConnectResponse) or not first.HasField(
                    "welcome"
                ):
                    await _raise_status(call)
                    raise _StreamEndedError("the controller did not say Welcome")
                self._welcomed(first.welcome)
                await self._converse(call)
            finally:
                call.cancel()

    async def _introduce(self, call: Any) -> object:
        try:
            await call.write(fleet_pb2.ConnectRequest(hello=self._hello()))
        except asyncio.InvalidStateError:  # the stream has ended already
            await _raise_status(call)
        answer: object = await call.read()
        return answer

    def _channel(self) -> grpc.aio.Channel:
        settings = self._settings
        if settings.insecure:
            return grpc.aio.insecure_channel(settings.address, options=_OPTIONS)
        roots = None
        if settings.ca_file:
            try:
                roots = Path(settings.ca_file).expanduser().read_bytes()
            except OSError as error:
                raise _StreamEndedError(f"{settings.ca_file}: {error.strerror}") from error
        options = _OPTIONS
        if settings.server_name:
            options = (*options, ("grpc.ssl_target_name_override", settings.server_name))  # type: ignore[assignment]
        return grpc.aio.secure_channel(
            settings.address, grpc.ssl_channel_credentials(roots), options=options
        )

    def _hello(self) -> fleet_pb2.Hello:
        return fleet_pb2.Hello(
            node_id=self._introduction.node_id,
            instance_id=self._introduction.instance_id,
            min_protocol_version=PROTOCOL_VERSION_MIN,
            max_protocol_version=PROTOCOL_VERSION_MAX,
            attributes=self._introduction.attributes(),
            models=self._introduction.models(),
        )

    def _welcomed(self, welcome: fleet_pb2.Welcome) -> None:
        self._outbox.acknowledge(welcome.acked_sequence)
        self._unsent_facts = [fact for _, fact in self._outbox.pending()]
        self._health_seconds = max(welcome.health_interval_seconds, 0.1)
        self._desk().is_draining = welcome.is_draining
        self._progress.clear()
        self._order_updates.clear()
        self._urgent.clear()
        self._has_models = True  # what changed since the Hello was made
        self._connected_at = time.monotonic()
        self._last_error = None
        self._something.set()
        log.info("link.connected", session_id=welcome.session_id)

    async def _converse(self, call: Any) -> None:
        """Read, write and report health until one of them ends, and raise why."""
        tasks = [
            asyncio.create_task(self._read(call), name="link-read"),
            asyncio.create_task(self._write(call), name="link-write"),
            asyncio.create_task(self._report_health(), name="link-health"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await _raise_status(call)
        for task in done:
            task.result()
        raise _StreamEndedError("the stream ended")

    async def _read(self, call: Any) -> None:
        desk = self._desk()
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                return
            if message.acked_sequence:
                self._outbox.acknowledge(message.acked_sequence)
            match message.WhichOneof("message"):
                case "work":
                    desk.accept(work_from_proto(message.work))
                case "cancel":
                    desk.cancel(message.cancel.request_id, message.cancel.attempt)
                case "drain":
                    desk.is_draining = message.drain.is_draining
                case "probe":
                    # Ahead of everything queued, so that it measures the path.
                    padding = bytes(min(message.probe.echo_bytes, _MAX_ECHO_BYTES))
                    echo = fleet_pb2.ProbeEcho(nonce=message.probe.nonce, padding=padding)
                    self._urgent.insert(0, fleet_pb2.ConnectRequest(probe_echo=echo))
                    self._something.set()
                case _:
                    given = order_from_proto(message)
                    if given is not None:
                        self._take_order(*given)
                    # If not: only an acknowledgement, or a newer controller's message.

    def _take_order(self, order_id: str, order: Order | None) -> None:
        if order is None or self._orders is None:
            why = "this agent does not know such an order; update it"
            self.order_updated(OrderUpdate(order_id, OrderPhase.FAILED, why))
        else:
            self._orders().accept(GivenOrder(order_id, order), self)

    async def _write(self, call: Any) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            async for message in self._outgoing():
                await call.write(message)

    async def _outgoing(self) -> AsyncIterator[fleet_pb2.ConnectRequest]:
        """Everything there is to say now, urgent things first, an answer's text before its end."""
        while self._urgent:
            yield self._urgent.pop(0)
        if self._has_models:
            self._has_models = False
            report = fleet_pb2.ModelReport(models=self._introduction.models())
            yield fleet_pb2.ConnectRequest(models=report)
        updates, self._order_updates = self._order_updates, {}
        for update in updates.values():
            yield fleet_pb2.ConnectRequest(order_update=update)
        facts, self._unsent_facts = self._unsent_facts, []
        progress, self._progress = self._progress, {}
        for (request_id, attempt), (pieces, tokens) in progress.items():
            yield fleet_pb2.ConnectRequest(
                progress=fleet_pb2.WorkProgress(
                    request_id=request_id, attempt=attempt, text="".join(pieces), tokens=tokens
                )
            )
        for fact in facts:
            yield fact

    async def _report_health(self) -> None:
        while True:
            try:
                health = fleet_pb2.ConnectRequest(health=self._introduction.health())
            except Exception:  # a sensor of a kind that nobody foresaw; the next sample may do
                log.exception("health.not_read")
            else:
                # One waiting sample is enough; an old one says nothing that a new one does not.
                self._urgent = [m for m in self._urgent if m.WhichOneof("message") != "health"]
                self._urgent.append(health)
                self._something.set()
            await asyncio.sleep(self._health_seconds)


class _StreamEndedError(Exception):
    """The stream ended without a status of its own."""


async def _raise_status(call: Any) -> None:
    """Raise the stream's status if it has ended with one that is not OK."""
    if not call.done():
        return
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise _StreamEndedError(f"{code.name.lower()}: {await call.details()}")


def _explain(error: grpc.aio.AioRpcError, settings: ControllerSettings) -> str:
    return f"{settings.address}: {error.code().name.lower()}: {error.details()}"


def check_address(settings: ControllerSettings) -> None:
    """Raise for an address that cannot be one.

    Raises:
        UsageError: says what an address looks like.
    """
    host, _, port = settings.address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"controller address: host:port such as controller.example:50551, "
            f"not {settings.address!r}"
        )
