"""The models of this node: carries out what each one's life asks for, and brings orders to it."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog
from typing_extensions import assert_never

from edge_agent.config import ModelSettings, Settings
from edge_agent.engine.registry import ENGINES, SpecOf, check_limits, run_alike
from edge_agent.engine.spec import FetchModel
from edge_agent.errors import (
    AgentError,
    EngineError,
    MemoryBudgetError,
    ModelBusyError,
    ModelError,
    UnknownModelError,
)
from edge_agent.serving.calibrations import KeptCalibrations
from edge_agent.serving.hosted import HostedModel, new_hosted
from edge_agent.serving.kept_orders import KeptOrder, KeptOrders, models_at_start, order_of
from edge_agent.serving.lifecycle import (
    MEASURING,
    Ailing,
    Ask,
    Closed,
    CloseEngine,
    Draining,
    Edit,
    Effect,
    EngineLoaded,
    Event,
    Faulted,
    Load,
    LoadEnded,
    Loading,
    Look,
    Measure,
    Measured,
    MeasureEnded,
    MeasureSpeed,
    Measuring,
    ModelLife,
    Pin,
    Prepare,
    Prepared,
    Preparing,
    Ready,
    Recall,
    Recalled,
    Reported,
    Started,
    StartEngine,
    Tell,
    Unload,
    Unloaded,
)
from edge_agent.serving.residency import NoRoom, Resident, budget_of, make_room
from edge_agent.serving.speeds import Calibrate, MeasureEnergy, SpeedMeter

log = structlog.get_logger()

_LOOK_SECONDS: Final = 0.25
_QUIET_SECONDS: Final = 60.0
"""How long a measurement waits for running answers to end."""
_LEAST_RESIDENCE_SECONDS: Final = 30.0
"""A request pushes out no model used within this time, or two would swap for ever."""
_PREPARED_AT_ONCE: Final = 2
_CLOSE_SECONDS: Final = 10.0

Waiters = defaultdict[str, "list[asyncio.Future[None]]"]


@dataclass(slots=True, repr=False)  # a traceback in the log need not show all models
class ModelHost:
    """Loads models one after the other, keeps them loaded, and gives their memory back.

    What becomes of a model is decided by `lifecycle.step` alone. Loading and measuring take turns,
    since two at once would fight for memory and disk. Whatever is loaded fits the memory budget
    together. Belongs to the event loop.

    Attributes:
        fetch: finds the files of models.
        on_change: called after each change of what the controller is told.
        engines: kinds of engine that models can have.
        available_bytes: memory for models when nothing else limits it; see `MemorySettings`.
        total_bytes: of the machine.
        measure_energy: joules of a token on a loaded local engine; None where nothing can tell.
        power_mode: the board's mode now; speeds are measured for each.
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
    _work: "dict[str, asyncio.Task[None]]" = field(init=False, default_factory=dict)
    _remeasuring: "dict[str, asyncio.Task[None]]" = field(init=False, default_factory=dict)
    _preparing: asyncio.Semaphore = field(
        init=False, default_factory=lambda: asyncio.Semaphore(_PREPARED_AT_ONCE)
    )
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _whose_turn: str | None = field(init=False, default=None)
    _loads: Waiters = field(init=False, default_factory=lambda: defaultdict(list))
    _measures: Waiters = field(init=False, default_factory=lambda: defaultdict(list))
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

    # -- what goes on by itself -------------------------------------------------------------------

    async def run(self) -> None:
        """Load what is wanted, then watch over the engines, until cancelled."""
        while True:
            for model in list(self.models.values()):
                if not isinstance(model.life.stage, Preparing | Loading | Measuring | Draining):
                    self._look(model)
            await asyncio.sleep(_LOOK_SECONDS)

    def _look(self, model: HostedModel) -> None:
        engine = model.engine
        self._post(
            model,
            Look(
                self.settings.memory.idle_seconds,
                None if engine is None else engine.stats(),
                self._speeds.hold_now(model),
            ),
        )

    async def close(self) -> None:
        """Stop all work and close every engine."""
        tasks = [*self._work.values(), *self._remeasuring.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        for model in self.models.values():
            if model.made is not None:
                await model.made.close()
                model.made = None

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
        known = self.models.get(name)
        entry = ModelSettings(name) if known is None else known.settings
        wanted = replace(
            entry,
            slots=entry.slots if slots is None else slots,
            context_tokens=entry.context_tokens if context_tokens is None else context_tokens,
        )
        check_limits(wanted)
        model = known or HostedModel(ModelLife(wanted, is_wanted=False), self.engines)
        self.models[name] = model
        try:
            await self._have(model, Load(wanted, Ask(is_order=True, idle_since=self.clock())))
        except (ModelError, EngineError):
            if known is None and isinstance(model.life.stage, Unloaded):
                self.models.pop(name, None)
                self._tell()
            raise
        made_room = [other for other in self.models.values() if other.gave_room_to == name]
        self._keep({name: True, **{other.name: False for other in made_room}})

    async def unload(self, name: str) -> None:
        """Let running answers end, for a while, then end the model's process.

        Raises:
            UnknownModelError: this node does not have it.
        """
        model = self._find(name)
        self._keep({name: False})
        self._post(model, Unload())
        await self._closed(model)

    def pin(self, name: str, is_pinned: bool) -> None:
        """Keep a model from being unloaded to make room or for being idle, or no longer.

        Raises:
            UnknownModelError: this node does not have it.
        """
        model = self._find(name)
        self._post(model, Pin(is_pinned))
        kept, listed = self._orders.orders.get(name), self._in_settings(name)
        if kept is not None:
            is_wanted = kept.is_wanted
        else:  # one that a request has pushed out, say, is loaded at the next start all the same
            is_wanted = listed.load_at_start if listed is not None else model.is_wanted
        self._keep({name: is_wanted})

    async def measure(self, name: str) -> None:
        """Measure a loaded model's speed again, between requests; what comes meanwhile waits.

        Raises:
            UnknownModelError: this node does not have it.
            ModelBusyError: it is not loaded, or its running answers do not end.
            EngineError: it cannot be measured.
        """
        model = self._find(name)
        await self._take_turn(model)
        try:
            if not model.is_ready or model.loaded is None:
                raise ModelBusyError(f"{name} is not loaded now; load it first")
            if model.loaded.declared_rates.are_complete:
                raise ModelBusyError(
                    f"{name} is not measured: its speeds are declared, or its answers cost money"
                )
            self._post(model, Measure())
        finally:
            if not model.is_measuring:
                self._pass_turn(model)
        await _told_in(self._measures[name])

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
        elif not model.is_wanted and isinstance(
            model.life.stage, Unloaded | Preparing | Loading | Measuring
        ):
            idle_since = self.clock() - _LEAST_RESIDENCE_SECONDS
            await self._have(model, Load(model.settings, Ask(idle_since=idle_since)))

    async def apply(self, settings: Settings) -> None:
        """Go over to other settings: load what is new, unload what is gone, reload what differs.

        Models that were ordered and are in no settings stay as they are, and so do orders about
        models whose settings stay the same.
        """
        before = {model.name: model for model in self.settings.models}
        self.settings = settings
        after = {model.name: model for model in settings.models}
        for name in before.keys() - after.keys():
            model = self.models.get(name)
            if model is not None:
                self._post(model, Unload())
                await self._closed(model)
                if isinstance(model.life.stage, Unloaded):  # no order has come for it meanwhile
                    del self.models[name]
        for name, wanted in after.items():
            model = self.models.get(name)
            if model is None:
                self.models[name] = new_hosted(wanted, self.engines)
            elif wanted != before.get(name):
                is_alike = run_alike(model.settings, wanted, self.engines)
                self._post(model, Edit(wanted, is_alike))
                await self._closed(model)
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

    # -- a model's life: events in, effects out ---------------------------------------------------

    def _post(self, model: HostedModel, event: Event) -> None:
        before = model.life.stage
        for effect in model.step(event, self.clock()):
            self._carry_out(model, effect)
        if isinstance(before, Measuring) and before.ask is not None and model.is_ready:
            _log_loaded(model)
        if not isinstance(model.life.stage, Loading | Measuring):
            self._pass_turn(model)
        if type(model.life.stage) is not type(before):
            self._wake()

    def _carry_out(self, model: HostedModel, effect: Effect) -> None:
        match effect:
            case Prepare():
                self._begin(model, self._prepare(model))
            case StartEngine():
                self._begin(model, self._start_engine(model))
            case MeasureSpeed(is_fresh):
                self._begin(model, self._measure_speed(model, is_fresh))
            case CloseEngine(lets_answers_end, reason):
                log.info("model.unloading", model=model.name, reason=reason)
                stopped = self._work.get(model.name)
                self._begin(model, self._close_engine(model, lets_answers_end, stopped))
            case Recall():
                self._recall(model)
            case Tell():
                self._tell()
            case LoadEnded(error):
                _tell_waiters(self._loads.pop(model.name, []), error)
            case MeasureEnded(error):
                _tell_waiters(self._measures.pop(model.name, []), error)
            case _:
                assert_never(effect)

    def _begin(self, model: HostedModel, work: Coroutine[Any, Any, Event]) -> None:
        name = model.name
        task = asyncio.create_task(self._do(model, work), name=f"model-{name}")
        self._work[name] = task

        def ended(_: object) -> None:
            if self._work.get(name) is task:
                del self._work[name]

        task.add_done_callback(ended)

    async def _do(self, model: HostedModel, work: Coroutine[Any, Any, Event]) -> None:
        """Post what a piece of work ends with; nothing when it was told to stop."""
        event: Event
        try:
            event = await work
        except AgentError as error:
            event = Faulted(f"{error.issue_name}: {error}", error)
        except Exception as error:
            log.exception("model.load_failed", model=model.name)
            issue = f"model_load_failed: {type(error).__name__}"
            event = Faulted(issue, ModelError(f"{issue}; the agent's log says more"))
        is_loading = isinstance(model.life.stage, Preparing | Loading | Measuring)
        if isinstance(event, Faulted) and is_loading and not model.is_measuring:
            _log_failed(model, event)
        self._post(model, event)

    async def _prepare(self, model: HostedModel) -> Event:
        task = asyncio.current_task()

        def report(
            text: str, progress_ratio: float | None = None, is_downloading: bool = False
        ) -> None:
            if self._work.get(model.name) is task:  # and not a later one's
                self._post(model, Reported(text, progress_ratio, is_downloading))

        if self._preparing.locked():
            report("waiting until other models are prepared")
        async with self._preparing:
            return Prepared(await model.spec.prepare(model.settings, self.fetch, report))

    async def _start_engine(self, model: HostedModel) -> Event:
        spec, settings, prepared = model.spec, model.settings, model.prepared
        assert prepared is not None  # a stage before
        needed = await asyncio.to_thread(spec.needed_bytes, settings, prepared) or 0
        await self._take_turn(model)
        await self._make_room(model, needed)
        self._post(model, Started(needed, spec.loading_text))
        assert model.made is None, "one engine at a time"
        engine = model.made = spec.make(settings, prepared)
        loaded = await engine.load()
        # What it really takes may be more than the estimate.
        reserved = max(needed, loaded.resident_bytes or 0)
        await self._make_room(model, reserved)
        return EngineLoaded(loaded, reserved)

    async def _measure_speed(self, model: HostedModel, is_fresh: bool) -> Event:
        engine, loaded = model.made, model.loaded
        assert engine is not None  # a stage before
        assert loaded is not None
        if is_fresh:
            if not await self._becomes_idle(model, _QUIET_SECONDS):
                raise ModelBusyError(
                    f"{model.name} was busy for {_QUIET_SECONDS:g} s, so it was not measured; try "
                    "when less is going on, or drain the node first"
                )
            self._post(model, Reported(MEASURING))
        return Measured(await self._speeds.speeds_of(model, engine, loaded, is_fresh))

    async def _close_engine(
        self, model: HostedModel, lets_answers_end: bool, stopped: "asyncio.Task[None] | None"
    ) -> Event:
        if stopped is not None:
            stopped.cancel()
            await asyncio.wait([stopped])
        engine = model.made
        if engine is not None:
            drain_seconds = self.settings.memory.drain_seconds
            if lets_answers_end and not await self._becomes_idle(model, drain_seconds):
                log.warning("model.unloaded_busy", model=model.name)
            try:
                await engine.close()
            except Exception:
                log.exception("model.close_failed", model=model.name)
            model.made = None
        return Closed()

    def _recall(self, model: HostedModel) -> None:
        """Take what was measured in this power mode before, or measure between requests."""
        kept = self._speeds.kept_for_now(model)
        if kept is not None:
            self._post(model, Recalled(kept))
        elif model.name not in self._remeasuring:
            log.info("model.power_mode_changed", model=model.name, power_mode=self.power_mode())
            task = asyncio.create_task(self._remeasure(model.name), name=f"measure-{model.name}")
            self._remeasuring[model.name] = task
            task.add_done_callback(lambda _: self._remeasuring.pop(model.name, None))

    async def _remeasure(self, name: str) -> None:
        try:
            await self.measure(name)
        except AgentError as error:
            log.warning("model.not_remeasured", model=name, reason=str(error))

    # -- turns and room ---------------------------------------------------------------------------

    async def _take_turn(self, model: HostedModel) -> None:
        await self._turn.acquire()
        self._whose_turn = model.name

    def _pass_turn(self, model: HostedModel) -> None:
        """Let another be loaded or measured, unless this one is just being."""
        if self._whose_turn == model.name:
            self._whose_turn = None
            self._turn.release()

    async def _make_room(self, model: HostedModel, needed_bytes: int) -> None:
        """Unload what has to go for a model; see `residency.make_room`.

        Raises:
            MemoryBudgetError: it does not fit all the same; nothing was unloaded.
        """
        others = [other for other in self.models.values() if other is not model]
        for other in others:
            await self._closed(other)
        stage = model.life.stage
        room = make_room(
            model.name,
            needed_bytes,
            self.budget_bytes,
            [_resident(other) for other in others if other.reserved_bytes],
            stage.ask.idle_since if isinstance(stage, Loading) else None,
        )
        if isinstance(room, NoRoom):
            raise MemoryBudgetError(room.message)
        for evicted in room.evict:
            self._post(self.models[evicted], Unload(room_for=model.name))
        for evicted in room.evict:
            await self._closed(self.models[evicted])

    async def _closed(self, model: HostedModel) -> None:
        """Wait until a model that is on its way out has gone."""
        while isinstance(model.life.stage, Draining):
            await self.next_change(_LOOK_SECONDS)

    async def _becomes_idle(self, model: HostedModel, seconds: float) -> bool:
        """Wait, at most this long, until a model has no request; whether that is so."""
        end = self.clock() + seconds
        while model.has_requests:
            if self.clock() >= end:
                return False
            await asyncio.sleep(0.05)
        return True

    # -- who waits --------------------------------------------------------------------------------

    async def _have(self, model: HostedModel, event: Load) -> None:
        """Ask for a model, and return when it is loaded.

        Raises:
            ModelError, EngineError: it could not be had, or another order has replaced this one.
        """
        self._post(model, event)
        if not isinstance(model.life.stage, Ready | Ailing):
            await _told_in(self._loads[model.name])

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

    def _tell(self) -> None:
        self._wake()
        self.on_change()

    def _wake(self) -> None:
        """Let those go on who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()


def _resident(model: HostedModel) -> Resident:
    is_at_rest = isinstance(model.life.stage, Ready | Ailing)
    return Resident(
        model.name,
        model.reserved_bytes,
        model.is_pinned,
        not is_at_rest or model.has_requests,
        model.last_used_at,
    )


async def _told_in(waiters: "list[asyncio.Future[None]]") -> None:
    """Wait to be told with others how a load or a measurement has ended; raises what they get."""
    told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(told)
    await told


def _tell_waiters(waiters: "list[asyncio.Future[None]]", error: AgentError | None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue  # it waits no more
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


def _log_loaded(model: HostedModel) -> None:
    speeds = model.speeds
    assert speeds is not None  # it was just measured
    log.info(
        "model.loaded",
        model=model.name,
        decode_tokens_per_second=round(speeds.decode_tokens_per_second, 1),
        saturated_decode_tokens_per_second=round(speeds.saturated_decode_tokens_per_second, 1),
        prefill_tokens_per_second=round(speeds.prefill_tokens_per_second, 1),
    )


def _log_failed(model: HostedModel, event: Faulted) -> None:
    error = event.error
    tail = error.stderr_tail.splitlines() if isinstance(error, EngineError) else []
    log.error("model.failed", model=model.name, issue=event.issue, stderr_tail=tail)
