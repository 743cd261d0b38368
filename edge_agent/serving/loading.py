"""From a prepared model to an engine that is loaded, fits its memory, and was measured."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from edge_agent.engine.base import InferenceEngine
from edge_agent.engine.spec import PreparedModel, Report
from edge_agent.serving.hosted import HostedModel
from edge_agent.serving.speeds import SpeedMeter

MakeRoom = Callable[[int], Awaitable[None]]
"""Has others give up memory until this many bytes are free; raises MemoryBudgetError."""


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads one model, and leaves nothing behind when that fails.

    Attributes:
        speeds: knows or measures what the loaded engine can do.
    """

    speeds: SpeedMeter

    async def load(
        self, model: HostedModel, prepared: PreparedModel, make_room: MakeRoom, report: Report
    ) -> InferenceEngine:
        """The loaded engine; `model` has its description, its speeds and its memory by then.

        Raises:
            EngineError: it cannot be loaded or measured; its process is gone.
            MemoryBudgetError: there is no room for it.
        """
        spec = model.spec
        needed = await asyncio.to_thread(spec.needed_bytes, model.settings, prepared) or 0
        await make_room(needed)
        report(spec.loading_text)
        model.reserved_bytes = needed
        engine = spec.make(model.settings, prepared)
        is_up = False
        try:
            model.loaded = await engine.load()
            model.reserved_bytes = max(model.reserved_bytes, model.loaded.resident_bytes or 0)
            # What it really takes may be more than the estimate.
            await make_room(model.reserved_bytes)
            report("measuring its speed")
            model.speeds = await self.speeds.speeds_of(model, engine, model.loaded)
            is_up = True
        finally:
            if not is_up:
                await engine.close()
        return engine
