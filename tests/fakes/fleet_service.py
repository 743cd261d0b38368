"""A controller that says what the test tells it to, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pointsman.v1 import fleet_pb2, fleet_pb2_grpc
from tests.fakes.waiting import PATIENCE_SECONDS, until


@dataclass
class ScriptedSession:
    """One stream of an agent; `received` is everything it said, in order."""

    hello: fleet_pb2.Hello
    received: list[fleet_pb2.ConnectRequest] = field(default_factory=list)
    outgoing: "asyncio.Queue[fleet_pb2.ConnectResponse | None]" = field(
        default_factory=asyncio.Queue
    )
    status: tuple[grpc.StatusCode, str] = (grpc.StatusCode.UNAVAILABLE, "the script ended it")

    def say(self, acked_sequence: int = 0, **message: Any) -> None:
        """Send one message to the agent."""
        self.outgoing.put_nowait(
            fleet_pb2.ConnectResponse(acked_sequence=acked_sequence, **message)
        )

    def welcome(self, **fields: Any) -> None:
        """Answer the introduction; reports come ten times a second."""
        fields.setdefault("protocol_version", 1)
        fields.setdefault("health_interval_seconds", 0.1)
        self.say(welcome=fleet_pb2.Welcome(**fields))

    def end(
        self,
        code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
        details: str = "the script ended it",
    ) -> None:
        """End the stream with a status."""
        self.status = (code, details)
        self.outgoing.put_nowait(None)

    def all(self, kind: str) -> list[Any]:
        """Everything of one kind that was received so far."""
        return [
            getattr(message, kind)
            for message in self.received
            if message.WhichOneof("message") == kind
        ]

    async def until(self, kind: str, count: int = 1) -> list[Any]:
        """Wait until so many of a kind have been received, and return them."""
        await until(lambda: len(self.all(kind)) >= count)
        return self.all(kind)


class ScriptedController(fleet_pb2_grpc.FleetServiceServicer):
    """Takes in agents and leaves everything else to the test."""

    def __init__(self) -> None:
        self.sessions: asyncio.Queue[ScriptedSession] = asyncio.Queue()
        self.refusal: tuple[grpc.StatusCode, str] | None = None

    async def next_session(self) -> ScriptedSession:
        """The next agent that connects."""
        return await asyncio.wait_for(self.sessions.get(), PATIENCE_SECONDS)

    async def Connect(  # noqa: N802 - the RPC's name
        self, request_iterator: AsyncIterator[fleet_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[fleet_pb2.ConnectResponse]:
        first = await anext(request_iterator)
        if self.refusal is not None:
            await context.abort(*self.refusal)
        session = ScriptedSession(first.hello)

        async def read() -> None:
            async for message in request_iterator:
                session.received.append(message)

        reading = asyncio.create_task(read())
        self.sessions.put_nowait(session)
        try:
            while (message := await session.outgoing.get()) is not None:
                yield message
        finally:
            reading.cancel()
        await context.abort(*session.status)


@asynccontextmanager
async def scripted_controller(
    folder: Path, controller: ScriptedController | None = None
) -> AsyncIterator[tuple[ScriptedController, str]]:
    """A scripted controller on a socket in `folder`, and its address."""
    controller = controller or ScriptedController()
    address = f"unix:{folder / 'controller.sock'}"
    server = grpc.aio.server()
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(controller, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    await server.start()
    try:
        yield controller, address
    finally:
        await server.stop(0)
