"""Gives a node's memory back: ends a model's process once its answers have ended."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from edge_agent.errors import MemoryBudgetError
from edge_agent.lifecycle import ModelPhase
from edge_agent.serving.hosted import HostedModel
from edge_agent.serving.residency import NoRoom, Resident, make_room

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Unloader:
    """Unloads models, one at a time: the caller sees to that.

    Attributes:
        models: of this node, by name; those of them that are loaded share the budget.
        budget_bytes: what they may take together now.
        drain_seconds: how long running answers may go on, now.
        say: notes in words what is being done to a model.
        clock: monotonic seconds.
    """

    models: Mapping[str, HostedModel]
    budget_bytes: Callable[[], int]
    drain_seconds: Callable[[], float]
    say: Callable[[HostedModel, str], None]
    clock: Callable[[], float]

    async def make_room(
        self, model: HostedModel, needed_bytes: int, idle_since: float | None
    ) -> None:
        """Unload what has to go for a model; see `residency.make_room`.

        Raises:
            MemoryBudgetError: it does not fit all the same; nothing was unloaded.
        """
        residents = [
            Resident(
                name,
                other.reserved_bytes,
                other.is_pinned,
                other.engine is None or other.is_measuring or other.has_requests,
                other.last_used_at,
            )
            for name, other in self.models.items()
            if other is not model and other.reserved_bytes
        ]
        name = model.settings.name
        room = make_room(name, needed_bytes, self.budget_bytes(), residents, idle_since)
        if isinstance(room, NoRoom):
            raise MemoryBudgetError(room.message)
        for evicted in room.evict:
            log.info("model.makes_room", model=evicted, room_for=name)
            other = self.models[evicted]
            other.is_wanted, other.gave_room_to = False, name
            await self.unload(other)

    async def unload(self, model: HostedModel) -> None:
        """Take nothing new, let what runs end, for a while, then end the process."""
        engine = model.engine
        model.phase, model.progress_ratio = ModelPhase.UNLOADED, None
        if engine is not None:
            self.say(model, "letting its running answers end")
            if not await self.becomes_idle(model, self.drain_seconds()):
                log.warning("model.unloaded_busy", model=model.settings.name)
            await engine.close()
            model.engine = None
        model.reserved_bytes = 0
        self.say(model, "")

    async def becomes_idle(self, model: HostedModel, seconds: float) -> bool:
        """Wait, at most this long, until a model has no request; whether that is so."""
        end = self.clock() + seconds
        while model.has_requests:
            if self.clock() >= end:
                return False
            await asyncio.sleep(0.05)
        return True
