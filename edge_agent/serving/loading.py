"""From a prepared model to an engine that is loaded, fits its memory, and was measured."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from edge_agent.engine.base import EngineSettings, InferenceEngine
from edge_agent.engine.remote.engine import OpenAiEngine, OpenAiSettings
from edge_agent.serving.engine_settings import local_engine_settings, remote_engine_settings
from edge_agent.serving.hosted import EstimateBytes, HostedModel, PreparedModel, Report
from edge_agent.serving.speeds import SpeedMeter

MakeEngine = Callable[[EngineSettings], InferenceEngine]
MakeRemoteEngine = Callable[[OpenAiSettings], OpenAiEngine]
MakeRoom = Callable[[int], Awaitable[None]]
"""Has others give up memory until this many bytes are free; raises MemoryBudgetError."""


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads one model, and leaves nothing behind when that fails.

    Attributes:
        make_engine: what decodes here.
        make_remote_engine: what asks a remote endpoint.
        estimate: memory that a model will need.
        speeds: knows or measures what the loaded engine can do.
    """

    make_engine: MakeEngine
    make_remote_engine: MakeRemoteEngine
    estimate: EstimateBytes
    speeds: SpeedMeter

    async def load(
        self, model: HostedModel, prepared: PreparedModel, make_room: MakeRoom, report: Report
    ) -> InferenceEngine:
        """The loaded engine; `model` has its description, its speeds and its memory by then.

        Raises:
            EngineError: it cannot be loaded or measured; its process is gone.
            MemoryBudgetError: there is no room for it.
        """
        if model.is_remote:
            report("trying out the remote endpoint")
            remote = self.make_remote_engine(remote_engine_settings(model.settings))
            return await self._bring_up(model, remote, make_room, report)
        settings = local_engine_settings(model.settings, prepared)
        needed = await asyncio.to_thread(self.estimate, settings) or 0
        await make_room(needed)
        report("loading")
        model.reserved_bytes = needed
        return await self._bring_up(model, self.make_engine(settings), make_room, report)

    async def _bring_up(
        self, model: HostedModel, engine: InferenceEngine, make_room: MakeRoom, report: Report
    ) -> InferenceEngine:
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
