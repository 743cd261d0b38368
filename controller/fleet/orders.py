"""Orders that nodes are carrying out, and who waits to hear how they go.

Belongs to the event loop. An order outlives its watchers: a node goes on loading when the operator
who asked has closed the terminal, and whoever gives the same order meanwhile joins the running one.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Final

from controller.config import OrderSettings
from controller.domain.order import Order, OrderUpdate
from controller.errors import NodeLostError, OrderTimeoutError, RouterError, TooManyOrdersError
from controller.ids import NodeId

_MAX_UNREAD: Final = 64
"""Updates kept for one slow watcher; of more, the oldest are dropped, for the last one counts."""

Send = Callable[[str], bool]
"""Give the order with this id to the node's link; False when the node is not there."""


class _Watcher:
    """One reader of one order's updates."""

    def __init__(self) -> None:
        self._unread: deque[OrderUpdate] = deque(maxlen=_MAX_UNREAD)
        self._failure: RouterError | None = None
        self._changed = asyncio.Event()

    def push(self, update: OrderUpdate) -> None:
        self._unread.append(update)
        self._changed.set()

    def fail(self, error: RouterError) -> None:
        self._failure = error
        self._changed.set()

    async def next(self, seconds: float) -> OrderUpdate:
        """The next update.

        Raises:
            asyncio.TimeoutError: none came within this long.
            RouterError: the order will not end.
        """
        # Not asyncio.wait_for: before Python 3.12 it may swallow a cancellation that comes
        # together with an update, and the watcher of a client that has gone would stay.
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        timer = loop.call_at(ends_at, self._changed.set)
        try:
            while True:
                if self._unread:
                    return self._unread.popleft()
                if self._failure is not None:
                    raise self._failure
                if loop.time() >= ends_at:
                    raise asyncio.TimeoutError
                self._changed.clear()
                await self._changed.wait()
        finally:
            timer.cancel()


@dataclass(slots=True, eq=False)
class _RunningOrder:
    node_id: NodeId
    order: Order
    deadline: float
    last_update: OrderUpdate | None = None
    watchers: list[_Watcher] = field(default_factory=list)


class OrderBook:
    """Every order that has been given and has not ended."""

    def __init__(self, settings: OrderSettings) -> None:
        self._settings = settings
        self._running: dict[str, _RunningOrder] = {}

    def __len__(self) -> int:
        return len(self._running)

    def is_busy(self, node_id: NodeId) -> bool:
        """Whether this node is carrying out an order."""
        return any(running.node_id == node_id for running in self._running.values())

    async def follow(
        self, node_id: NodeId, order: Order, send: Send
    ) -> AsyncGenerator[OrderUpdate, None]:
        """Give an order, or join the same one that is running, and hear how it goes.

        Yields:
            updates as they come; the last one says that it is done or has failed.

        Raises:
            NodeLostError: the node is not there, or went away.
            OrderTimeoutError: the node does not answer, or is not done in time.
            TooManyOrdersError: too many orders are running.
        """
        now = asyncio.get_running_loop().time()
        self._drop_overdue(now)
        order_id = self._joinable(node_id, order)
        if order_id is None:
            order_id = self._begin(node_id, order, now)
            if not send(order_id):
                del self._running[order_id]
                raise NodeLostError(f"Node {node_id} is not connected; start its agent.")
        running, watcher = self._running[order_id], _Watcher()
        running.watchers.append(watcher)
        if running.last_update is not None:
            watcher.push(running.last_update)
        try:
            async for update in self._updates(running, watcher):
                yield update
        finally:
            running.watchers.remove(watcher)

    async def _updates(
        self, running: _RunningOrder, watcher: _Watcher
    ) -> AsyncGenerator[OrderUpdate, None]:
        loop = asyncio.get_running_loop()
        while True:
            silence = (
                self._settings.accept_seconds
                if running.last_update is None
                else self._settings.silence_seconds
            )
            seconds = min(silence, max(running.deadline - loop.time(), 0.0))
            try:
                update = await watcher.next(seconds)
            except asyncio.TimeoutError:
                raise OrderTimeoutError(_why_late(running, seconds)) from None
            yield update
            if update.is_last:
                return

    def updated(self, node_id: NodeId, update: OrderUpdate) -> None:
        """A node told how an order goes; what belongs to no running order of it is ignored."""
        running = self._running.get(update.order_id)
        if running is None or running.node_id != node_id:
            return
        running.last_update = update
        if update.is_last:
            del self._running[update.order_id]
        for watcher in running.watchers:
            watcher.push(update)

    def lost(self, node_id: NodeId, why: str) -> None:
        """The node's session has ended: nobody will hear the end of its orders."""
        for order_id, running in list(self._running.items()):
            if running.node_id == node_id:
                del self._running[order_id]
                for watcher in running.watchers:
                    watcher.fail(
                        NodeLostError(
                            f"Node {node_id} was lost before the order was done: {why}. When it "
                            "is back, `edge-controller nodes` shows what it has; repeat the order "
                            "if need be."
                        )
                    )

    def _joinable(self, node_id: NodeId, order: Order) -> str | None:
        for order_id, running in self._running.items():
            if running.node_id == node_id and running.order == order:
                return order_id
        return None

    def _begin(self, node_id: NodeId, order: Order, now: float) -> str:
        if len(self._running) >= self._settings.max_running:
            raise TooManyOrdersError(
                f"{len(self._running)} orders are running; wait until one ends."
            )
        order_id = f"order-{uuid.uuid4().hex}"
        self._running[order_id] = _RunningOrder(node_id, order, now + self._settings.total_seconds)
        return order_id

    def _drop_overdue(self, now: float) -> None:
        """Forget orders whose end nobody has heard of in time; a repeat is then a new order."""
        for order_id, running in list(self._running.items()):
            is_unheard = running.last_update is None and not running.watchers
            if running.deadline <= now or is_unheard:
                del self._running[order_id]


def _why_late(running: _RunningOrder, seconds: float) -> str:
    if running.last_update is None:
        return (
            f"Node {running.node_id} did not acknowledge the order within {seconds:g} s; update "
            "its agent, which may be too old for such orders."
        )
    status = running.last_update.message or "working on it"
    return (
        f"No progress at node {running.node_id} for {seconds:g} s (last status: {status}). The "
        "order may still complete; check `edge-controller nodes`."
    )
