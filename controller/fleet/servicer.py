"""FleetService: node streams in, orders out."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from controller.fleet.convert import BadReportError
from controller.fleet.links import NodeLink
from controller.fleet.sessions import FleetSessions, IncompatibleVersionError
from pointsman.v1 import fleet_pb2, fleet_pb2_grpc

log = structlog.get_logger()

_HELLO_SECONDS: Final = 10.0
"""How long a fresh stream may take to introduce itself."""


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """One handler runs per connected agent."""

    def __init__(self, sessions: FleetSessions) -> None:
        self._sessions = sessions

    async def Connect(  # noqa: N802 - the RPC's name; async only here
        self,
        request_iterator: AsyncIterator[fleet_pb2.ConnectRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[fleet_pb2.ConnectResponse]:
        """Serve one agent for the life of its session."""
        try:
            first = await asyncio.wait_for(anext(request_iterator), _HELLO_SECONDS)
        except (asyncio.TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the first message is Hello")
        if first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the first message is Hello")
        try:
            link = self._sessions.connect(first.hello)
        except IncompatibleVersionError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except BadReportError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        reader = asyncio.create_task(
            self._read(request_iterator, link, first.hello.instance_id),
            name=f"read-{link.session_id}",
        )
        try:
            while (message := await link.next_message()) is not None:
                yield message
        finally:
            reader.cancel()
            # The stream may have ended by cancellation, with nobody having said why.
            self._sessions.disconnect(link, link.closed_because or "the stream ended")
        await context.abort(grpc.StatusCode.UNAVAILABLE, link.closed_because or "the stream ended")

    async def _read(
        self,
        request_iterator: AsyncIterator[fleet_pb2.ConnectRequest],
        link: NodeLink,
        instance_id: str,
    ) -> None:
        try:
            async for message in request_iterator:
                self._sessions.receive(link, message, instance_id)
            why = "the agent closed the stream"
        except (BadReportError, DecodeError) as error:
            why = f"bad report: {error}"
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("node.read_failed", node_id=link.node_id)
            why = "reading from the agent failed"
        self._sessions.disconnect(link, why)
