"""An agent that says what the test tells it to, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from controller.domain.node_report import NodeHello
from controller.fleet.convert import ATTRIBUTES, HEALTH, MODEL
from pointsman.v1 import fleet_pb2, fleet_pb2_grpc
from tests.fakes.reports import health, hello
from tests.fakes.waiting import PATIENCE_SECONDS, until


class ScriptedAgent:
    """The node's end of one session; `received` is every order it got, in order."""

    def __init__(self) -> None:
        self.received: list[fleet_pb2.ConnectResponse] = []
        self._outgoing: asyncio.Queue[fleet_pb2.ConnectRequest | None] = asyncio.Queue()
        self._sequence = 0

    def say(self, **message: Any) -> None:
        """Send one message that may be lost."""
        self._outgoing.put_nowait(fleet_pb2.ConnectRequest(**message))

    def order_update(self, order_id: str, phase: Any, message: str = "") -> None:
        """Tell how an order goes, in a numbered message."""
        self._sequence += 1
        update = fleet_pb2.OrderUpdate(order_id=order_id, phase=phase, message=message)
        self.say(sequence=self._sequence, order_update=update)

    def leave(self) -> None:
        """End the stream."""
        self._outgoing.put_nowait(None)

    async def until(self, kind: str, count: int = 1) -> list[Any]:
        """Wait until so many of a kind have been received, and return them."""

        def found() -> list[Any]:
            return [getattr(m, kind) for m in self.received if m.WhichOneof("message") == kind]

        await until(lambda: len(found()) >= count)
        return found()

    async def _messages(self, introduction: NodeHello) -> AsyncIterator[fleet_pb2.ConnectRequest]:
        yield fleet_pb2.ConnectRequest(
            hello=fleet_pb2.Hello(
                node_id=introduction.node_id,
                instance_id=introduction.instance_id,
                min_protocol_version=1,
                max_protocol_version=1,
                attributes=ATTRIBUTES.write(introduction.attributes),
                models=[MODEL.write(model) for model in introduction.models],
            )
        )
        yield fleet_pb2.ConnectRequest(health=HEALTH.write(health()))
        while (message := await self._outgoing.get()) is not None:
            yield message


@asynccontextmanager
async def scripted_agent(
    address: str, introduction: NodeHello | None = None
) -> AsyncIterator[ScriptedAgent]:
    """A connected agent; its session ends with the context."""
    agent = ScriptedAgent()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)  # type: ignore[assignment]
        call = stub.Connect(agent._messages(introduction or hello()))

        async def read() -> None:
            async for message in call:
                agent.received.append(message)

        async def stay_alive() -> None:
            while True:
                await asyncio.sleep(0.2)
                agent.say(health=HEALTH.write(health()))

        reading, living = asyncio.create_task(read()), asyncio.create_task(stay_alive())
        await asyncio.wait_for(agent.until("welcome"), PATIENCE_SECONDS)
        try:
            yield agent
        finally:
            agent.leave()
            for task in (reading, living):
                task.cancel()
            await asyncio.wait([reading, living])
