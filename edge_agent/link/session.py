"""The stream to the controller: introduces the node, keeps the lease, reconnects for ever."""

import asyncio
import random
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import grpc
import structlog

from edge_agent.config import ControllerSettings
from edge_agent.errors import UsageError
from edge_agent.link.backoff import Backoff
from edge_agent.link.convert import (
    work_from_proto,
)
from edge_agent.link.outgoing import Outgoing
from edge_agent.serving.orders import GivenOrder, Order, OrderDesk, OrderPhase, OrderUpdate
from edge_agent.serving.work import WorkDesk
from pointsman.convert import order_from_proto
from pointsman.v1 import fleet_pb2, fleet_pb2_grpc

log = structlog.get_logger()

PROTOCOL_VERSION_MIN: Final = 1
PROTOCOL_VERSION_MAX: Final = 1

_WELCOME_SECONDS: Final = 10.0
_MAX_ECHO_BYTES: Final = 1 << 20

_OPTIONS: Final = (
    # The server permits pings this frequent (grpc_server.py); together with the lease they find a
    # half-open stream.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


class Introduction(Protocol):
    """What the node says of itself."""

    @property
    def node_id(self) -> str:
        """Its name."""

    @property
    def instance_id(self) -> str:
        """Of this start of the agent."""

    def attributes(self) -> fleet_pb2.StaticAttributes:
        """What does not change while the agent runs."""

    def models(self) -> list[fleet_pb2.ModelState]:
        """Every model as it is now."""

    def health(self) -> fleet_pb2.HealthSample:
        """One health sample; what it raises is logged, and the next one may do."""


class LinkSession:
    """Keeps one stream to the controller open. Belongs to the event loop.

    Args:
        introduction: what the node says of itself.
        outgoing: what it has to say.
        desk: carries out work orders.
        orders: carries out orders about models; None refuses them.
        rng: for the jitter of reconnects.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        introduction: Introduction,
        outgoing: Outgoing,
        desk: WorkDesk,
        orders: OrderDesk | None,
        rng: random.Random,
        backoff: Backoff | None = None,
    ) -> None:
        self._settings = settings
        self._introduction = introduction
        self._outgoing = outgoing
        self._desk = desk
        self._orders = orders
        self._rng = rng
        self._backoff = backoff or Backoff()
        self._health_seconds = 1.0

    # -- the stream -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, serve, and connect again, until cancelled."""
        failures = 0
        while True:
            try:
                await self._serve_once()
            except grpc.aio.AioRpcError as error:
                reason = _explain(error, self._settings)
            except (OSError, asyncio.TimeoutError, _StreamEndedError) as error:
                reason = str(error) or type(error).__name__
            except Exception as error:  # whatever it was, the node comes back by itself
                log.exception("link.crashed")
                reason = f"the link failed inside the agent: {type(error).__name__}"
            was_connected = self._outgoing.lost(reason)
            failures = 1 if was_connected else failures + 1
            self._desk.cancel_all()
            delay = self._backoff.delay_seconds(failures, self._rng)
            log.warning(
                "link.lost" if was_connected else "link.failed",
                reason=reason,
                retry_seconds=round(delay, 2),
            )
            await asyncio.sleep(delay)

    async def _serve_once(self) -> NoReturn:
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
        self._health_seconds = max(welcome.health_interval_seconds, 0.1)
        self._desk.is_draining = welcome.is_draining
        self._outgoing.welcomed(welcome.acked_sequence)
        log.info("link.connected", session_id=welcome.session_id)

    async def _converse(self, call: Any) -> NoReturn:
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
        desk = self._desk
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                return
            if message.acked_sequence:
                self._outgoing.acknowledge(message.acked_sequence)
            match message.WhichOneof("message"):
                case "work":
                    desk.accept(work_from_proto(message.work))
                case "cancel":
                    desk.cancel(message.cancel.request_id, message.cancel.attempt)
                case "drain":
                    desk.is_draining = message.drain.is_draining
                case "probe":
                    padding = bytes(min(message.probe.echo_bytes, _MAX_ECHO_BYTES))
                    nonce = message.probe.nonce
                    self._outgoing.echo(fleet_pb2.ProbeEcho(nonce=nonce, padding=padding))
                case _:
                    given = order_from_proto(message)
                    if given is not None:
                        self._take_order(*given)
                    # If not: only an acknowledgement, or a newer controller's message.

    def _take_order(self, order_id: str, order: Order | None) -> None:
        if order is None or self._orders is None:
            why = "this agent does not know such an order; update it"
            self._outgoing.order_updated(OrderUpdate(order_id, OrderPhase.FAILED, why))
        else:
            self._orders.accept(GivenOrder(order_id, order), self._outgoing)

    async def _write(self, call: Any) -> None:
        while True:
            await self._outgoing.wait()
            for message in self._outgoing.messages(self._introduction.models):
                await call.write(message)

    async def _report_health(self) -> None:
        while True:
            try:
                self._outgoing.report_health(self._introduction.health())
            except Exception:  # a sensor of a kind that nobody foresaw; the next sample may do
                log.exception("health.not_read")
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
