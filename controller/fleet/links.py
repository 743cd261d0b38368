"""Live agent links: orders out.

A link belongs to the event loop; sending never waits.
"""

import asyncio
from typing import Final

from controller.ids import NodeId, SessionId
from pointsman.v1 import fleet_pb2

_MAX_WAITING_ORDERS: Final = 4096
"""More unsent orders than this mean that the node has stopped reading."""


class NodeLink:
    """The outgoing half of one session."""

    def __init__(self, node_id: NodeId, session_id: SessionId) -> None:
        self.node_id = node_id
        self.session_id = session_id
        self._outgoing: asyncio.Queue[fleet_pb2.ConnectResponse | None] = asyncio.Queue()
        self._closed_because: str | None = None

    @property
    def closed_because(self) -> str | None:
        """Why the link was closed; None while it is open."""
        return self._closed_because

    def send(self, message: fleet_pb2.ConnectResponse) -> bool:
        """Queue a message; False when the link is closed."""
        if self._closed_because is not None:
            return False
        if self._outgoing.qsize() >= _MAX_WAITING_ORDERS:
            self.close("the node has stopped reading its orders")
            return False
        self._outgoing.put_nowait(message)
        return True

    def close(self, why: str) -> None:
        """End the stream; whoever waits in `next_message` gets None."""
        if self._closed_because is None:
            self._closed_because = why
            self._outgoing.put_nowait(None)

    async def next_message(self) -> fleet_pb2.ConnectResponse | None:
        """The next message to write; None once the link is closed."""
        if self._closed_because is not None:
            return None
        return await self._outgoing.get()
