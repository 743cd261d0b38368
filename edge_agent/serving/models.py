"""The models of this node: from a name in the settings or an order to a loaded, measured engine."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog

from edge_agent.config import ModelSettings, Settings
from edge_agent.engine.base import EngineSettings, InferenceEngine, LoadedModel
from edge_agent.engine.openai import OpenAiEngine, OpenAiSettings, Rates
from edge_agent.engine.openai_endpoint import RemoteError
from edge_agent.errors import (
    AgentError,
    EngineError,
    EngineFailure,
    MemoryBudgetError,
    ModelBusyError,
    ModelError,
    UnknownModelError,
)
from edge_agent.lifecycle import ModelPhase
from edge_agent.serving.calibrations import KeptCalibrations, Speeds
from edge_agent.serving.engine_settings import local_engine_settings, remote_engine_settings
from edge_agent.serving.hosted import (
    EstimateBytes,
    HostedModel,
    PreparedModel,
    PrepareModel,
    Report,
    estimate_model_bytes,
    new_hosted,
)
from edge_agent.serving.residency import NoRoom, Resident, budget_of, make_room
from edge_agent.serving.token_energy import TokenEnergy

__all__ = [
    "Calibrate",
    "HostedModel",
    "MakeEngine",
    "ModelHost",
    "PrepareModel",
    "PreparedModel",
    "Report",
    "Speeds",
    "remote_engine_settings",
]

log = structlog.get_logger()

_CALIBRATION_METHOD: Final = 2
"""Raised when speeds are measured in another way, so that kept ones are measured anew."""

_RETRY_SECONDS: Final = (5.0, 15.0, 60.0)
"""Waits before a model that could not be loaded is tried again; the last one repeats."""

_LOOK_SECONDS: Final = 0.25
_QUIET_SECONDS: Final = 60.0
"""How long a measurement waits for running answers to end."""
_MEASURING_SECONDS: Final = 300.0
_LEAST_RESIDENCE_SECONDS: Final = 30.0
"""A request pushes out no model used within this time, or two would swap for ever (R10)."""
_PREPARED_AT_ONCE: Final = 2

MakeEngine = Callable[[EngineSettings], InferenceEngine]
MakeRemoteEngine = Callable[[OpenAiSettings], OpenAiEngine]
Calibrate = Callable[[InferenceEngine, int], Awaitable[Speeds]]
MeasureEnergy = Callable[[InferenceEngine, int], Awaitable[TokenEnergy | None]]

_IMMEDIATE: Final = frozenset(
    {
        "load_at_start",
        "is_pinned",
        "prompt_usd_per_token",
        "completion_usd_per_token",
        "request_usd",
    }
)
"""Settings of a local model that change nothing of how it is run."""


@dataclass(slots=True)
class ModelHost:
    """Loads models one after the other, keeps them loaded, and gives their memory back.

    Loading and unloading happen one at a time, since two loads at once would fight for memory and
    disk. Whatever is loaded fits the memory budget together. Belongs to the event loop.

    Attributes:
        on_change: called after each change of what the controller is told.
        make_remote_engine: what asks a remote endpoint.
        estimate: memory that a model will need.
        available_bytes: memory for models when nothing else limits it; see `MemorySettings`.
        total_bytes: of the machine.
        measure_energy: joules of a token on a loaded local engine; None where nothing can tell.
        power_mode: the board's mode now; speeds are measured anew for each.
        clock: monotonic seconds.
    """

    settings: Settings
    prepare: PrepareModel
    make_engine: MakeEngine
    calibrate: Calibrate
    on_change: Callable[[], None]
    make_remote_engine: MakeRemoteEngine = OpenAiEngine
    estimate: EstimateBytes = estimate_model_bytes
    available_bytes: int = 1 << 60
    total_bytes: int = 1 << 60
    measure_energy: MeasureEnergy | None = None
    power_mode: Callable[[], str] = lambda: ""
    clock: Callable[[], float] = time.monotonic
    models: dict[str, HostedModel] = field(init=False)
    _calibrations: KeptCalibrations = field(init=False)
    _changing: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _preparing: asyncio.Semaphore = field(
        init=False, default_factory=lambda: asyncio.Semaphore(_PREPARED_AT_ONCE)
    )
    _loading: "dict[str, asyncio.Task[None]]" = field(init=False, default_factory=dict)
    _remeasuring: "asyncio.Task[None] | None" = field(init=False, default=None)
    _unloading: "asyncio.Task[None] | None" = field(init=False, default=None)
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.models = {model.name: new_hosted(model) for model in self.settings.models}
        self._calibrations = KeptCalibrations(self.settings.data_dir / "calibrations.json")

    # -- what goes on by itself -------------------------------------------------------------------

    async def run(self) -> None:
        """Load what is wanted, then watch over the engines, until cancelled."""
        while True:
            now = self.clock()
            for name, model in list(self.models.items()):
                if model.engine is not None:
                    self._follow(model, model.engine, now)
                elif model.is_wanted and name not in self._loading and now >= model.retry_at:
                    self._start_loading(model, None)
            await asyncio.sleep(_LOOK_SECONDS)

    async def close(self) -> None:
        """Unload everything."""
        background = (self._remeasuring, self._unloading)
        tasks = [*self._loading.values(), *(task for task in background if task is not None)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)
        for model in self.models.values():
            if model.engine is not None:
                await model.engine.close()
                model.engine = None

    def _follow(self, model: HostedModel, engine: InferenceEngine, now: float) -> None:
        """Show what became of a loaded engine; it restarts its own child."""
        if model.phase is ModelPhase.UNLOADED or model.is_measuring:
            return  # whoever does that tells how it goes
        stats = engine.stats()
        if stats.busy_slots + stats.queued_requests:
            model.last_used_at = now
        model.reserved_bytes = max(model.reserved_bytes, stats.resident_bytes or 0)
        phase = ModelPhase.READY if stats.is_ready else ModelPhase.FAILED
        template = model.loaded.template_issue if model.loaded else None
        issue = stats.issue or template or ""
        if (phase, issue) != (model.phase, model.issue):
            model.phase, model.issue = phase, issue
            self._tell()
        idle_seconds = self.settings.memory.idle_seconds
        if idle_seconds and not model.is_pinned and now - model.last_used_at >= idle_seconds:
            if self._unloading is None:
                self._unloading = asyncio.create_task(self._unload_idle(model), name="unload-idle")
                self._unloading.add_done_callback(self._unloaded)
        elif self._is_measured_otherwise(model) and self._remeasuring is None:
            self._remeasuring = asyncio.create_task(self._remeasure(model), name="remeasure")
            self._remeasuring.add_done_callback(self._remeasured)

    # -- what somebody asks for -------------------------------------------------------------------

    async def load(
        self, name: str, slots: int | None = None, context_tokens: int | None = None
    ) -> None:
        """Have a model loaded, measured and ready; an idle, unpinned one may have to make room.

        Args:
            name: in the settings, else in the catalogue.
            slots: None takes the settings'.
            context_tokens: of one sequence; None takes the settings'.

        Raises:
            ModelError, EngineError: it could not be had; what was loaded before still is, unless
                it had to make room.
        """
        model = self.models.get(name)
        is_new = model is None
        if model is None:
            model = HostedModel(ModelSettings(name), ModelPhase.UNLOADED, is_wanted=False)
        wanted = replace(
            model.settings,
            slots=model.settings.slots if slots is None else slots,
            context_tokens=model.settings.context_tokens
            if context_tokens is None
            else context_tokens,
        )
        _check_limits(wanted)
        if wanted != model.settings and (model.engine is not None or name in self._loading):
            await self.unload(name)
        if model.engine is not None and not model.is_ready:
            async with self._changing:
                pass  # it is being unloaded or measured; its restarts are the engine's own affair
        model.settings = wanted
        self.models[name] = model
        if model.engine is None:
            task = self._loading.get(name) or self._start_loading(model, self.clock())
            try:
                await asyncio.shield(task)
            except (ModelError, EngineError):
                if is_new:
                    self.models.pop(name, None)
                    self._tell()
                raise
        model.is_wanted = True

    async def unload(self, name: str) -> None:
        """Let running answers end, for a while, then end the model's process.

        Raises:
            UnknownModelError: this node does not have it.
        """
        model = self._find(name)
        model.is_wanted = False
        loading = self._loading.get(name)
        if loading is not None:
            loading.cancel()
            await asyncio.wait([loading], timeout=30.0)
        async with self._changing:
            await self._unload(model)

    def pin(self, name: str, is_pinned: bool) -> None:
        """Keep a model from being unloaded to make room or for being idle, or no longer.

        Raises:
            UnknownModelError: this node does not have it.
        """
        self._find(name).is_pinned = is_pinned
        self._tell()

    async def measure(self, name: str) -> None:
        """Measure a loaded model's speed anew, between requests; what comes meanwhile waits.

        Raises:
            UnknownModelError: this node does not have it.
            ModelBusyError: it is not loaded, or its running answers do not end.
            EngineError: it cannot be measured.
        """
        model = self._find(name)
        async with self._changing:
            engine, loaded = model.engine, model.loaded
            if not model.is_ready or engine is None or loaded is None:
                raise ModelBusyError(f"{name} is not loaded now; load it first")
            if isinstance(engine, OpenAiEngine) and engine.known_rates is not None:
                raise ModelBusyError(
                    f"{name} is not measured: its speeds are declared, or its answers cost money"
                )
            model.is_measuring, model.phase = True, ModelPhase.LOADING
            try:
                self._say(model, "waiting until its answers have ended")
                if not await self._becomes_idle(model, _QUIET_SECONDS):
                    raise ModelBusyError(
                        f"{name} was busy for {_QUIET_SECONDS:g} s, so it was not measured; try "
                        "when less is going on, or drain the node first"
                    )
                self._say(model, "measuring its speed")
                model.speeds = await self._speeds(model, engine, loaded, is_fresh=True)
            finally:
                model.is_measuring, model.phase = False, ModelPhase.READY
                self._say(model, loaded.template_issue or "")

    async def bring(self, name: str) -> None:
        """Return when a model can answer that was unloaded, or is being measured.

        A model that is loading for other reasons is not waited for.

        Raises:
            ModelError, EngineError: it cannot be loaded now.
        """
        model = self.models.get(name)
        if model is None or model.is_ready:
            return
        if model.is_measuring:
            while model.is_measuring:
                await self.next_change(_LOOK_SECONDS)
        elif model.engine is None and not model.is_wanted:
            task = self._loading.get(name) or self._start_loading(
                model, self.clock() - _LEAST_RESIDENCE_SECONDS
            )
            await asyncio.shield(task)

    async def apply(self, settings: Settings) -> None:
        """Go over to other settings: load what is new, unload what is gone, reload what differs.

        Models that were ordered and are in no settings stay as they are.
        """
        before = {model.name: model for model in self.settings.models}
        self.settings = settings
        after = {model.name: model for model in settings.models}
        for name in before.keys() - after.keys():
            if name in self.models:
                await self.unload(name)
                del self.models[name]
        for name, wanted in after.items():
            model = self.models.get(name)
            if model is None:
                self.models[name] = new_hosted(wanted)
                continue
            if wanted == before.get(name):
                continue
            if not _runs_alike(model.settings, wanted):
                await self.unload(name)
                model.is_wanted, model.retry_at, model.failures = wanted.load_at_start, 0.0, 0
                model.prepared = model.loaded = model.speeds = None
            model.settings, model.is_pinned = wanted, wanted.is_pinned
        self._tell()

    async def next_change(self, seconds: float) -> None:
        """Return after the next change of any model, or after this long."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except asyncio.TimeoutError:
            return

    @property
    def budget_bytes(self) -> int:
        """What all loaded models may take together."""
        return budget_of(self.settings.memory, self.available_bytes, self.total_bytes)

    @property
    def reserved_bytes(self) -> int:
        """What loaded models are counted with."""
        return sum(model.reserved_bytes for model in self.models.values())

    # -- loading ----------------------------------------------------------------------------------

    def _start_loading(self, model: HostedModel, idle_since: float | None) -> "asyncio.Task[None]":
        return self._track(model, self._load(model, idle_since))

    def _track(self, model: HostedModel, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        name = model.settings.name
        task = asyncio.create_task(work, name=f"model-{name}")
        self._loading[name] = task

        def ended(_: object) -> None:
            if self._loading.get(name) is task:
                del self._loading[name]
            if not task.cancelled():
                task.exception()  # told by the model's issue already

        task.add_done_callback(ended)
        return task

    async def _load(self, model: HostedModel, idle_since: float | None) -> None:
        def report(
            text: str, progress_ratio: float | None = None, is_downloading: bool = False
        ) -> None:
            model.phase = ModelPhase.DOWNLOADING if is_downloading else ModelPhase.LOADING
            model.progress_ratio = progress_ratio
            self._say(model, text)

        engines: list[InferenceEngine] = []
        try:
            report("asking the remote endpoint" if model.is_remote else "preparing the model file")
            async with self._preparing:
                model.prepared = await self.prepare(model.settings.name, report)
            async with self._changing:
                await self._load_prepared(model, model.prepared, idle_since, report, engines)
        except AgentError as error:
            await self._give_up(model, engines, _issue_of(error))
            raise
        except asyncio.CancelledError:
            for engine in engines:
                await engine.close()
            model.engine, model.reserved_bytes, model.progress_ratio = None, 0, None
            model.phase, model.issue = ModelPhase.UNLOADED, ""
            self._tell()
            raise
        except Exception as error:
            log.exception("model.load_failed", model=model.settings.name)
            issue = f"model_load_failed: {type(error).__name__}"
            await self._give_up(model, engines, issue)
            raise ModelError(f"{issue}; the agent's log says more") from error

    async def _load_prepared(
        self,
        model: HostedModel,
        prepared: PreparedModel,
        idle_since: float | None,
        report: Report,
        engines: list[InferenceEngine],
    ) -> None:
        engine: InferenceEngine
        if model.is_remote:
            report("trying out the remote endpoint")
            engine = self.make_remote_engine(remote_engine_settings(model.settings))
        else:
            settings = local_engine_settings(model.settings, prepared)
            needed = await asyncio.to_thread(self.estimate, settings) or 0
            await self._make_room(model, needed, idle_since)
            report("loading")
            model.reserved_bytes = needed
            engine = self.make_engine(settings)
        engines.append(engine)
        model.loaded = await engine.load()
        model.reserved_bytes = max(model.reserved_bytes, model.loaded.resident_bytes or 0)
        # What it really takes may be more than the estimate.
        await self._make_room(model, model.reserved_bytes, idle_since)
        report("measuring its speed")
        model.speeds = await self._speeds(model, engine, model.loaded)
        model.engine = engine
        model.phase, model.issue = ModelPhase.READY, model.loaded.template_issue or ""
        model.progress_ratio, model.failures = None, 0
        model.last_used_at = self.clock()
        log.info(
            "model.loaded",
            model=model.settings.name,
            decode_rate=round(model.speeds.decode_rate, 1),
            saturated_decode_rate=round(model.speeds.saturated_decode_rate, 1),
            prefill_rate=round(model.speeds.prefill_rate, 1),
        )
        self._tell()

    async def _give_up(
        self, model: HostedModel, engines: list[InferenceEngine], issue: str
    ) -> None:
        for engine in engines:
            await engine.close()
        model.reserved_bytes, model.progress_ratio = 0, None
        if model.is_wanted:
            model.phase, model.issue = ModelPhase.FAILED, issue
            pause = _RETRY_SECONDS[min(model.failures, len(_RETRY_SECONDS) - 1)]
            model.failures += 1
            model.retry_at = self.clock() + pause
        else:  # whoever asked is told; nobody else misses it
            model.phase, model.issue = ModelPhase.UNLOADED, ""
        log.error("model.failed", model=model.settings.name, issue=issue)
        self._tell()

    async def _make_room(
        self, model: HostedModel, needed_bytes: int, idle_since: float | None
    ) -> None:
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
        room = make_room(
            model.settings.name, needed_bytes, self.budget_bytes, residents, idle_since
        )
        if isinstance(room, NoRoom):
            raise MemoryBudgetError(room.message)
        for name in room.evict:
            log.info("model.makes_room", model=name, room_for=model.settings.name)
            self.models[name].is_wanted = False
            await self._unload(self.models[name])

    async def _unload_idle(self, model: HostedModel) -> None:
        async with self._changing:
            if not model.has_requests:
                log.info("model.was_idle", model=model.settings.name)
                model.is_wanted = False
                await self._unload(model)

    def _unloaded(self, task: "asyncio.Task[None]") -> None:
        self._unloading = None
        if not task.cancelled() and task.exception() is not None:
            log.error("model.not_unloaded", exc_info=task.exception())

    async def _unload(self, model: HostedModel) -> None:
        """Take nothing new, let what runs end, end the process; the caller holds `_changing`."""
        engine = model.engine
        model.phase, model.progress_ratio = ModelPhase.UNLOADED, None
        if engine is not None:
            self._say(model, "letting its running answers end")
            if not await self._becomes_idle(model, self.settings.memory.drain_seconds):
                log.warning("model.unloaded_busy", model=model.settings.name)
            await engine.close()
            model.engine = None
        model.reserved_bytes = 0
        self._say(model, "")

    async def _becomes_idle(self, model: HostedModel, seconds: float) -> bool:
        end = self.clock() + seconds
        while model.has_requests:
            if self.clock() >= end:
                return False
            await asyncio.sleep(0.05)
        return True

    # -- speeds -----------------------------------------------------------------------------------

    async def _speeds(
        self,
        model: HostedModel,
        engine: InferenceEngine,
        loaded: LoadedModel,
        is_fresh: bool = False,
    ) -> Speeds:
        """Measured before under the same conditions, or measured now and kept."""
        declared = Rates()
        measured = engine
        if isinstance(engine, OpenAiEngine):
            if engine.known_rates is not None:
                return Speeds(*engine.known_rates, engine_version=loaded.engine_version)
            declared = engine.settings.declared
            measured = engine.for_measuring()
        mode = "" if model.is_remote else self.power_mode()
        key = self._calibration_key(model, loaded, mode)
        speeds = None if is_fresh else self._calibrations.find(key)
        if speeds is None:
            try:
                speeds = await asyncio.wait_for(
                    self.calibrate(measured, loaded.slots), _MEASURING_SECONDS
                )
            except asyncio.TimeoutError as error:
                raise EngineError(
                    EngineFailure.STALLED,
                    f"measuring its speed took longer than {_MEASURING_SECONDS:g} s",
                ) from error
            speeds = replace(
                speeds,
                measured_slots=loaded.slots,
                engine_version=loaded.engine_version,
                power_mode=mode,
            )
            energy = None
            if self.measure_energy is not None and not model.is_remote:
                energy = await self.measure_energy(engine, loaded.slots)
            if energy is not None:
                speeds = replace(
                    speeds,
                    load_watts=energy.load_watts,
                    prefill_joules_per_token=energy.prefill_joules_per_token,
                    decode_joules_per_token=energy.decode_joules_per_token,
                )
            self._calibrations.keep(key, speeds)
        return replace(
            speeds,
            prefill_rate=declared.prefill or speeds.prefill_rate,
            decode_rate=declared.decode or speeds.decode_rate,
            saturated_decode_rate=declared.saturated_decode or speeds.saturated_decode_rate,
        )

    def _calibration_key(self, model: HostedModel, loaded: LoadedModel, power_mode: str) -> str:
        """All that a measured speed depends on."""
        assert model.prepared is not None
        conditions = [
            f"method={_CALIBRATION_METHOD}",
            model.prepared.digest,
            loaded.engine_version,
            f"slots={model.settings.slots}",
        ]
        if not model.is_remote:
            settings = local_engine_settings(model.settings, model.prepared)
            conditions += [
                f"threads={settings.threads}",
                f"gpu={settings.gpu_layers}",
                f"share={settings.cpu_share_ratio:g}",
                f"context={settings.context_tokens}",
                f"power={power_mode}",
            ]
        return "/".join(conditions)

    def _is_measured_otherwise(self, model: HostedModel) -> bool:
        """Whether its speeds hold for another power mode than the board has now."""
        return (
            model.is_ready
            and not model.is_remote
            and model.speeds is not None
            and model.speeds.power_mode != self.power_mode()
            and self.clock() >= model.retry_at
        )

    async def _remeasure(self, model: HostedModel) -> None:
        """Take what was measured in this power mode before, or measure between requests."""
        mode = self.power_mode()
        model.retry_at = self.clock() + _RETRY_SECONDS[-1]
        if model.loaded is not None:
            kept = self._calibrations.find(self._calibration_key(model, model.loaded, mode))
            if kept is not None:
                model.speeds, model.retry_at = kept, 0.0
                self._tell()
                return
        log.info("model.power_mode_changed", model=model.settings.name, power_mode=mode)
        await self.measure(model.settings.name)

    def _remeasured(self, task: "asyncio.Task[None]") -> None:
        self._remeasuring = None
        if not task.cancelled() and task.exception() is not None:
            log.warning("model.not_remeasured", reason=str(task.exception()))

    # -- telling ----------------------------------------------------------------------------------

    def _find(self, name: str) -> HostedModel:
        model = self.models.get(name)
        if model is None:
            raise UnknownModelError(
                f"{name} is not on this node; it has: {', '.join(self.models) or 'no model'}"
            )
        return model

    def _say(self, model: HostedModel, text: str) -> None:
        model.issue = text
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()


def _check_limits(model: ModelSettings) -> None:
    if not 1 <= model.slots <= 256:
        raise ModelError(f"{model.name}: slots must be 1 to 256, not {model.slots}")
    if not 0 <= model.context_tokens <= 1 << 20:
        raise ModelError(
            f"{model.name}: context_tokens must be 0 to {1 << 20}, not {model.context_tokens}"
        )


def _runs_alike(one: ModelSettings, other: ModelSettings) -> bool:
    """Whether going from one to the other changes nothing of how the model is run."""
    if one.remote is not None or other.remote is not None:
        return one == other  # whether it may be measured goes by its price
    return replace(one, **{name: getattr(other, name) for name in _IMMEDIATE}) == other


def _issue_of(error: AgentError) -> str:
    if isinstance(error, RemoteError):
        return f"{error.issue.value}: {error}"
    if isinstance(error, EngineError):
        name = (
            "model_file_missing" if error.kind is EngineFailure.MISSING_FILE else error.kind.value
        )
        return f"{name}: {error}"
    if isinstance(error, MemoryBudgetError):
        return f"memory_budget: {error}"
    return f"model_unavailable: {error}"
