"""Orders about this node's models, from the controller or from its own command line."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import structlog
from typing_extensions import assert_never

from edge_agent.errors import AgentError, UnknownModelError
from edge_agent.serving.models import ModelHost
from pointsman.values import ManageModel as ManageModel
from pointsman.values import MeasureSpeed as MeasureSpeed
from pointsman.values import ModelAction as ModelAction
from pointsman.values import Order as Order
from pointsman.values import OrderPhase as OrderPhase
from pointsman.values import OrderUpdate as OrderUpdate

log = structlog.get_logger()

_KNOWN_ORDERS: Final = 256
"""Orders remembered after their end, so that a repeat only hears where it stands."""

_SIGN_SECONDS: Final = 5.0
"""An order that takes long shows a sign of life this often."""


@dataclass(frozen=True, slots=True)
class GivenOrder:
    """An order; the same one has the same id, however often it comes."""

    order_id: str
    order: Order


class OrderListener(Protocol):
    """Who is told how orders go; does not wait."""

    def order_updated(self, update: OrderUpdate) -> None:
        """An order goes on, or has ended."""
        ...


class OrderDesk:
    """Carries out orders, each once, and tells how they go. Belongs to the event loop.

    An order outlives the session it came in: a node goes on loading when the controller is away.

    Args:
        host: whose models they are about.
        clock: monotonic seconds.
    """

    def __init__(self, host: ModelHost, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._known: OrderedDict[str, OrderUpdate] = OrderedDict()
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def running_orders(self) -> int:
        """Orders that have not ended."""
        return len(self._running)

    def accept(self, given: GivenOrder, listener: OrderListener) -> None:
        """Start an order; of a known one only tell where it stands."""
        known = self._known.get(given.order_id)
        if known is not None:
            listener.order_updated(known)
            return
        self._known[given.order_id] = OrderUpdate(given.order_id, OrderPhase.RUNNING)
        while len(self._known) > _KNOWN_ORDERS:
            oldest = next(iter(self._known))
            if oldest in self._running:
                self._known.move_to_end(oldest)  # never forgotten while it runs
                if len(self._running) >= len(self._known):
                    break
            else:
                del self._known[oldest]
        task = asyncio.create_task(self._carry_out(given, listener), name=f"order-{given.order_id}")
        self._running[given.order_id] = task
        task.add_done_callback(lambda _: self._running.pop(given.order_id, None))

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)

    async def _carry_out(self, given: GivenOrder, listener: OrderListener) -> None:
        last = OrderUpdate(given.order_id, OrderPhase.RUNNING, "taken up")
        told_at = self._clock()
        listener.order_updated(last)
        work = asyncio.create_task(self._do(given.order), name=f"work-{given.order_id}")
        try:
            while not work.done():
                changed = asyncio.create_task(self._host.next_change(_SIGN_SECONDS))
                await asyncio.wait([work, changed], return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                now, update = self._clock(), self._running_update(given.order, last)
                if not work.done() and (update != last or now - told_at >= _SIGN_SECONDS):
                    last, told_at = update, now
                    self._known[given.order_id] = update
                    listener.order_updated(update)
            message = work.result()
            end = OrderUpdate(given.order_id, OrderPhase.DONE, message, 1.0)
        except AgentError as error:
            end = OrderUpdate(given.order_id, OrderPhase.FAILED, str(error))
        except asyncio.CancelledError:
            if not work.done():
                work.cancel()
                self._known[given.order_id] = OrderUpdate(
                    given.order_id, OrderPhase.FAILED, "the agent stopped"
                )
                listener.order_updated(self._known[given.order_id])
                raise
            end = OrderUpdate(given.order_id, OrderPhase.FAILED, "another order replaced this one")
        except Exception:
            log.exception("order.failed", order_id=given.order_id)
            end = OrderUpdate(
                given.order_id, OrderPhase.FAILED, "the agent failed; its log says why"
            )
        self._known[given.order_id] = end
        log.info(
            "order.ended",
            order_id=given.order_id,
            order=type(given.order).__name__,
            model=given.order.model,
            outcome=end.phase.value,
            message=end.message,
        )
        listener.order_updated(end)

    async def _do(self, order: Order) -> str:
        """Do it; returns what was done, in words."""
        host = self._host
        match order:
            case ManageModel(ModelAction.LOAD, name, slots, context_tokens):
                await host.load(name, slots, context_tokens)
                return f"{name} is loaded"
            case ManageModel(ModelAction.UNLOAD, name):
                await host.unload(name)
                return f"{name} is unloaded"
            case ManageModel(action, name):
                host.pin(name, action is ModelAction.PIN)
                return f"{name} is {'pinned' if action is ModelAction.PIN else 'not pinned'}"
            case MeasureSpeed(name):
                return await self._measure(name)
            case _:
                assert_never(order)

    async def _measure(self, name: str | None) -> str:
        if name:
            await self._host.measure(name)
            return f"{name} is measured"
        measured, failed = [], []
        for found in [name for name, model in self._host.models.items() if model.is_ready]:
            try:
                await self._host.measure(found)
                measured.append(found)
            except AgentError as error:
                failed.append(str(error))
        if not measured:
            raise UnknownModelError("; ".join(failed) or "no model is loaded on this node")
        return "; ".join([f"measured: {', '.join(measured)}", *failed])

    def _running_update(self, order: Order, last: OrderUpdate) -> OrderUpdate:
        models = self._host.models
        if order.model:
            model = models.get(order.model)
        else:
            model = next((found for found in models.values() if found.is_measuring), None)
        if model is None or not model.issue:
            return last
        return replace(last, message=model.issue, progress_ratio=model.progress_ratio)
