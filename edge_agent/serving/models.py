"""The models of this node: from a name in the settings or an order to a loaded, measured engine."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog

from edge_agent.config import ModelSettings, Settings
from edge_agent.engine.base import InferenceEngine
from edge_agent.engine.llama.failures import is_want_of_memory
from edge_agent.engine.registry import ENGINES, SpecOf, check_limits, run_alike
from edge_agent.engine.spec import FetchModel
from edge_agent.errors import (
    AgentError,
    EngineError,
    ModelBusyError,
    ModelError,
    UnknownModelError,
)
from edge_agent.lifecycle import ModelPhase
from edge_agent.serving.calibrations import KeptCalibrations
from edge_agent.serving.hosted import HostedModel, new_hosted
from edge_agent.serving.kept_orders import KeptOrder, KeptOrders, models_at_start, order_of
from edge_agent.serving.loading import ModelLoader
from edge_agent.serving.residency import budget_of
from edge_agent.serving.speeds import Calibrate, MeasureEnergy, SpeedMeter
from edge_agent.serving.unloading import Unloader

log = structlog.get_logger()

_RETRY_SECONDS: Final = (5.0, 15.0, 60.0)
"""Waits before a model that could not be loaded is tried again; the last one repeats."""

_MEMORY_RETRY_SECONDS: Final = 30.0
"""The least of those waits after a want of memory, which ends by others' giving some back (P13)."""

_LOOK_SECONDS: Final = 0.25
_QUIET_SECONDS: Final = 60.0
"""How long a measurement waits for running answers to end."""
_LEAST_RESIDENCE_SECONDS: Final = 30.0
"""A request pushes out no model used within this time, or two would swap for ever (R10)."""
_PREPARED_AT_ONCE: Final = 2


@dataclass(slots=True)
class ModelHost:
    """Loads models one after the other, keeps them loaded, and gives their memory back.

    Loading and unloading happen one at a time, since two loads at once would fight for memory and
    disk. Whatever is loaded fits the memory budget together. Belongs to the event loop.

    Attributes:
        on_change: called after each change of what the controller is told.
        engines: kinds of engine that models can have.
        available_bytes: memory for models when nothing else limits it; see `MemorySettings`.
        total_bytes: of the machine.
        measure_energy: joules of a token on a loaded local engine; None where nothing can tell.
        power_mode: the board's mode now; speeds are measured anew for each.
        clock: monotonic seconds.
    """

    settings: Settings
    fetch: FetchModel
    calibrate: Calibrate
    on_change: Callable[[], None]
    engines: Sequence[SpecOf] = ENGINES
    available_bytes: int = 1 << 60
    total_bytes: int = 1 << 60
    measure_energy: MeasureEnergy | None = None
    power_mode: Callable[[], str] = lambda: ""
    clock: Callable[[], float] = time.monotonic
    models: dict[str, HostedModel] = field(init=False)
    _orders: KeptOrders = field(init=False)
    _speeds: SpeedMeter = field(init=False)
    _loader: ModelLoader = field(init=False)
    _unloader: Unloader = field(init=False)
    _changing: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _preparing: asyncio.Semaphore = field(
        init=False, default_factory=lambda: asyncio.Semaphore(_PREPARED_AT_ONCE)
    )
    _loading: "dict[str, asyncio.Task[None]]" = field(init=False, default_factory=dict)
    _remeasuring: "asyncio.Task[None] | None" = field(init=False, default=None)
    _unloading: "asyncio.Task[None] | None" = field(init=False, default=None)
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        folder = self.settings.data_dir
        self._orders = KeptOrders(folder / "model-orders.json")
        self.models = models_at_start(self.settings.models, self._orders.orders, self.engines)
        self._speeds = SpeedMeter(
            KeptCalibrations(folder / "calibrations.json"),
            self.calibrate,
            self.measure_energy,
            self.power_mode,
        )
        self._loader = ModelLoader(self._speeds)
        self._unloader = Unloader(
            self.models,
            lambda: self.budget_bytes,
            lambda: self.settings.memory.drain_seconds,
            self._say,
            self.clock,
        )

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
        model.failure = stats.failure
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
        elif self._is_to_be_remeasured(model) and self._remeasuring is None:
            self._remeasuring = asyncio.create_task(self._remeasure(model), name="remeasure")
            self._remeasuring.add_done_callback(self._remeasured)

    # -- what somebody asks for -------------------------------------------------------------------

    async def load(
        self, name: str, slots: int | None = None, context_tokens: int | None = None
    ) -> None:
        """Have a model loaded, measured and ready; an idle, unpinned one may have to make room.

        Kept over restarts, as are the orders to unload and to pin, until the settings of the model
        are edited.

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
            model = HostedModel(
                ModelSettings(name), ModelPhase.UNLOADED, is_wanted=False, engines=self.engines
            )
        wanted = replace(
            model.settings,
            slots=model.settings.slots if slots is None else slots,
            context_tokens=model.settings.context_tokens
            if context_tokens is None
            else context_tokens,
        )
        check_limits(wanted)
        if wanted != model.settings and (model.engine is not None or name in self._loading):
            await self._take_down(model)
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
        made_room = [other for other in self.models.values() if other.gave_room_to == name]
        self._keep({name: True, **{other.settings.name: False for other in made_room}})

    async def unload(self, name: str) -> None:
        """Let running answers end, for a while, then end the model's process.

        Raises:
            UnknownModelError: this node does not have it.
        """
        model = self._find(name)
        self._keep({name: False})
        await self._take_down(model)

    def pin(self, name: str, is_pinned: bool) -> None:
        """Keep a model from being unloaded to make room or for being idle, or no longer.

        Raises:
            UnknownModelError: this node does not have it.
        """
        model = self._find(name)
        model.is_pinned = is_pinned
        kept, listed = self._orders.orders.get(name), self._in_settings(name)
        if kept is not None:
            is_wanted = kept.is_wanted
        else:  # one that a request has pushed out, say, is loaded at the next start all the same
            is_wanted = listed.load_at_start if listed is not None else model.is_wanted
        self._keep({name: is_wanted})
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
            if loaded.declared_rates.are_complete:
                raise ModelBusyError(
                    f"{name} is not measured: its speeds are declared, or its answers cost money"
                )
            model.is_measuring, model.phase = True, ModelPhase.LOADING
            try:
                self._say(model, "waiting until its answers have ended")
                if not await self._unloader.becomes_idle(model, _QUIET_SECONDS):
                    raise ModelBusyError(
                        f"{name} was busy for {_QUIET_SECONDS:g} s, so it was not measured; try "
                        "when less is going on, or drain the node first"
                    )
                self._say(model, "measuring its speed")
                model.speeds = await self._speeds.speeds_of(model, engine, loaded, is_fresh=True)
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

        Models that were ordered and are in no settings stay as they are, and so do orders about
        models whose settings stay the same.
        """
        before = {model.name: model for model in self.settings.models}
        self.settings = settings
        after = {model.name: model for model in settings.models}
        for name in before.keys() - after.keys():
            if name in self.models:
                await self._take_down(self.models[name])
                del self.models[name]
        for name, wanted in after.items():
            model = self.models.get(name)
            if model is None:
                self.models[name] = new_hosted(wanted, self.engines)
                continue
            if wanted == before.get(name):
                continue
            if not run_alike(model.settings, wanted, self.engines):
                await self._take_down(model)
                model.is_wanted, model.retry_at, model.failures = wanted.load_at_start, 0.0, 0
                model.prepared = model.loaded = model.speeds = None
            model.settings, model.is_pinned = wanted, wanted.is_pinned
        edited = before.keys() | after.keys()
        self._orders.put({n: None for n in edited if before.get(n) != after.get(n)})
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

        try:
            if self._preparing.locked():
                report("waiting until other models are prepared")
            async with self._preparing:
                prepared = await model.spec.prepare(model.settings, self.fetch, report)
                model.prepared = prepared
            async with self._changing:

                async def room_for(needed_bytes: int) -> None:
                    await self._unloader.make_room(model, needed_bytes, idle_since)

                model.engine = await self._loader.load(model, prepared, room_for, report)
                self._loaded(model)
        except AgentError as error:
            self._give_up(model, f"{error.issue_name}: {error}", error)
            raise
        except asyncio.CancelledError:
            model.reserved_bytes, model.progress_ratio = 0, None
            model.phase, model.issue = ModelPhase.UNLOADED, ""
            self._tell()
            raise
        except Exception as error:
            log.exception("model.load_failed", model=model.settings.name)
            issue = f"model_load_failed: {type(error).__name__}"
            self._give_up(model, issue)
            raise ModelError(f"{issue}; the agent's log says more") from error

    def _loaded(self, model: HostedModel) -> None:
        assert model.loaded is not None
        assert model.speeds is not None
        model.phase, model.issue = ModelPhase.READY, model.loaded.template_issue or ""
        model.progress_ratio, model.failures, model.gave_room_to = None, 0, ""
        model.failure = None
        model.last_used_at = self.clock()
        log.info(
            "model.loaded",
            model=model.settings.name,
            decode_tokens_per_second=round(model.speeds.decode_tokens_per_second, 1),
            saturated_decode_tokens_per_second=round(
                model.speeds.saturated_decode_tokens_per_second, 1
            ),
            prefill_tokens_per_second=round(model.speeds.prefill_tokens_per_second, 1),
        )
        self._tell()

    def _give_up(self, model: HostedModel, issue: str, error: AgentError | None = None) -> None:
        model.reserved_bytes, model.progress_ratio = 0, None
        engine_error = error if isinstance(error, EngineError) else None
        model.failure = None if engine_error is None else engine_error.kind
        if model.is_wanted:
            model.phase, model.issue = ModelPhase.FAILED, issue
            pause = _RETRY_SECONDS[min(model.failures, len(_RETRY_SECONDS) - 1)]
            if is_want_of_memory(engine_error):
                pause = max(pause, _MEMORY_RETRY_SECONDS)
            model.failures += 1
            model.retry_at = self.clock() + pause
        else:  # whoever asked is told; nobody else misses it
            model.phase, model.issue = ModelPhase.UNLOADED, ""
        log.error(
            "model.failed",
            model=model.settings.name,
            issue=issue,
            stderr_tail=[] if engine_error is None else engine_error.stderr_tail.splitlines(),
        )
        self._tell()

    async def _unload_idle(self, model: HostedModel) -> None:
        async with self._changing:
            if not model.has_requests:
                log.info("model.was_idle", model=model.settings.name)
                model.is_wanted = False
                await self._unloader.unload(model)

    def _unloaded(self, task: "asyncio.Task[None]") -> None:
        self._unloading = None
        if not task.cancelled() and task.exception() is not None:
            log.error("model.not_unloaded", exc_info=task.exception())

    async def _take_down(self, model: HostedModel) -> None:
        """Unload a model, wherever it is in its life, and want it no more."""
        model.is_wanted = False
        loading = self._loading.get(model.settings.name)
        if loading is not None:
            loading.cancel()
            await asyncio.wait([loading], timeout=30.0)
        async with self._changing:
            await self._unloader.unload(model)

    # -- speeds -----------------------------------------------------------------------------------

    def _is_to_be_remeasured(self, model: HostedModel) -> bool:
        """Whether its speeds hold for another power mode than the board has now."""
        is_due = model.is_ready and self.clock() >= model.retry_at
        return is_due and not self._speeds.hold_now(model)

    async def _remeasure(self, model: HostedModel) -> None:
        """Take what was measured in this power mode before, or measure between requests."""
        mode = self.power_mode()
        model.retry_at = self.clock() + _RETRY_SECONDS[-1]
        kept = self._speeds.kept_for_now(model)
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

    # -- orders that outlive the agent ------------------------------------------------------------

    def _in_settings(self, name: str) -> ModelSettings | None:
        return next((entry for entry in self.settings.models if entry.name == name), None)

    def _keep(self, is_wanted: dict[str, bool]) -> None:
        """Note what an order has come to, for the next start."""
        changes: dict[str, KeptOrder | None] = {
            name: order_of(self.models[name], wanted, self._in_settings(name))
            for name, wanted in is_wanted.items()
        }
        self._orders.put(changes)

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
