"""Live agent links: what goes out to nodes.

Links belong to the event loop; sending never waits.
"""

import asyncio
from collections.abc import Iterator
from typing import Final

from controller.domain.batch import Placement
from controller.domain.request import InferenceRequest
from controller.fleet.convert import work_order
from controller.fleet.registry import Registry
from controller.ids import NodeId, RequestId, SessionId
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


class NodeLinks:
    """The link of each connected node, and which of its facts may be acknowledged on it.

    A numbered fact is acknowledged once what it brought is kept. One that ends a request waits for
    that request's story: whoever keeps it calls `settle` when it is handed over, and `acknowledge`
    when it is kept.

    Args:
        registry: which sessions are current, and which facts have arrived.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._by_node: dict[NodeId, NodeLink] = {}
        self._held: dict[RequestId, tuple[NodeId, str, int]] = {}

    def __iter__(self) -> Iterator[NodeLink]:
        return iter(list(self._by_node.values()))

    def get(self, node_id: NodeId) -> NodeLink | None:
        """The link of a node; None while it is not connected."""
        return self._by_node.get(node_id)

    def add(self, link: NodeLink) -> None:
        """A session has begun."""
        self._by_node[link.node_id] = link

    def remove(self, node_id: NodeId, why: str) -> None:
        """A session has ended; its link is closed."""
        link = self._by_node.pop(node_id, None)
        if link is not None:
            link.close(why)

    def send(self, node_id: NodeId, message: fleet_pb2.ConnectResponse) -> bool:
        """Queue a message for a node; False when it is not there."""
        link = self._by_node.get(node_id)
        return link is not None and link.send(message)

    def send_work(
        self,
        node_id: NodeId,
        request: InferenceRequest,
        attempt: int,
        placement: Placement,
        time_limit_seconds: float,
    ) -> bool:
        """Send a request to its node; False when the node is not there."""
        if placement.chosen is None or node_id not in self._by_node:
            return False
        order = work_order(request, attempt, placement.chosen.model, time_limit_seconds)
        return self.send(node_id, fleet_pb2.ConnectResponse(work=order))

    def send_cancel(self, node_id: NodeId, request_id: RequestId, attempt: int) -> None:
        """Tell a node to stop; a node that is gone has stopped already."""
        cancel = fleet_pb2.CancelWork(request_id=request_id, attempt=attempt)
        self.send(node_id, fleet_pb2.ConnectResponse(cancel=cancel))

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

    def hold(self, request_id: RequestId, node_id: NodeId, instance_id: str, sequence: int) -> None:
        """A fact has arrived that ends a request, whose story is yet to be kept."""
        self.settle(request_id)  # of an attempt elsewhere, whose node was lost
        self._registry.hold(node_id, sequence)
        self._held[request_id] = (node_id, instance_id, sequence)

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
        if self._registry.keep(node_id, instance_id, sequence):
            self.send(node_id, fleet_pb2.ConnectResponse(acked_sequence=sequence))
