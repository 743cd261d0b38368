"""The life of a model as a machine, without an event loop."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from typing_extensions import assert_never

from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineStats, LoadedModel
from edge_agent.engine.spec import PreparedModel
from edge_agent.errors import EngineError, EngineFailure, ModelError
from edge_agent.serving.calibrations import Speeds
from edge_agent.serving.lifecycle import (
    Ailing,
    Ask,
    Closed,
    CloseEngine,
    Draining,
    Edit,
    Effect,
    EngineLoaded,
    Event,
    Failed,
    Faulted,
    IllegalModelMoveError,
    Known,
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
    ModelPhase,
    Pin,
    Prepare,
    Prepared,
    Preparing,
    Ready,
    Recall,
    Recalled,
    Reported,
    Residence,
    Stage,
    Started,
    StartEngine,
    Tell,
    Unload,
    Unloaded,
    Used,
    step,
)

SMALL = ModelSettings("small", slots=2)
LARGER = ModelSettings("small", slots=4)
PREPARED = PreparedModel(Path("/small.gguf"), "digest", "llama", 0.1, "Q4_0", 2048, None)
LOADED = LoadedModel(2048, 2, True, None, "fake", None, 4.5, "fake", 40)
SPEEDS = Speeds(100.0, 10.0, 20.0)
STOP = ModelError("no source has it")
WELL = EngineStats(True, 2, 0, 0, 0.0, 50, None)
BUSY = EngineStats(True, 2, 1, 0, 0.0, 50, None)
ILL = EngineStats(False, 2, 0, 0, 0.0, None, "engine_crashed: why", EngineFailure.CRASHED)

RESIDENCE = Residence(40, last_used_at=5.0)
STAGES: dict[str, Stage] = {
    "unloaded": Unloaded(),
    "preparing": Preparing(Ask(), "pulling", 0.5, is_downloading=True),
    "loading": Loading(Ask(), "loading", 40),
    "measuring": Measuring(Ask(), RESIDENCE),
    "measuring again": Measuring(None, RESIDENCE),
    "ready": Ready(RESIDENCE),
    "ailing": Ailing(RESIDENCE, "engine_crashed: why", EngineFailure.CRASHED),
    "draining": Draining(Unloaded(), lets_answers_end=True, reserved_bytes=40),
    "failed": Failed("memory_budget: none", None, 1, retry_at=20.0),
}
EVENTS: dict[str, Event] = {
    "load": Load(SMALL, Ask(is_order=True, idle_since=1.0)),
    "load larger": Load(LARGER, Ask(is_order=True, idle_since=1.0)),
    "unload": Unload(),
    "edit": Edit(LARGER, runs_alike=False),
    "edit a price": Edit(replace(SMALL, request_usd=1.0), runs_alike=True),
    "pin": Pin(True),
    "used": Used(9.0),
    "measure": Measure(),
    "look": Look(stats=WELL),
    "reported": Reported("half of it"),
    "prepared": Prepared(PREPARED),
    "started": Started(40, "loading"),
    "engine loaded": EngineLoaded(LOADED, 40),
    "measured": Measured(SPEEDS),
    "recalled": Recalled(SPEEDS),
    "broke": Faulted("model_unavailable: no source has it", STOP),
    "closed": Closed(),
}


def life_in(stage: Stage, is_wanted: bool = True) -> ModelLife:
    return ModelLife(SMALL, is_wanted, stage=stage, known=Known(PREPARED, LOADED, SPEEDS))


def after(stage: Stage, event: Event, now: float = 10.0, is_wanted: bool = True) -> ModelLife:
    return step(life_in(stage, is_wanted), event, now)[0]


U, P, L, M, R, A, D, F = (
    Unloaded,
    Preparing,
    Loading,
    Measuring,
    Ready,
    Ailing,
    Draining,
    Failed,
)
X = IllegalModelMoveError
TABLE: dict[str, list[type]] = {
    # unloaded, preparing, loading, measuring, measuring again, ready, ailing, draining, failed
    "load": [P, P, L, M, M, R, A, D, P],
    "load larger": [P, D, D, D, D, D, D, D, P],
    "unload": [U, D, D, D, D, D, D, D, U],
    "edit": [U, D, D, D, D, D, D, D, U],
    "edit a price": [U, P, L, M, M, R, A, D, F],
    "pin": [U, P, L, M, M, R, A, D, F],
    "used": [X, X, X, X, X, R, X, X, X],
    "measure": [X, X, X, X, X, M, X, X, X],
    "look": [P, P, L, M, M, R, R, D, F],
    "reported": [X, P, X, M, M, X, X, D, X],
    "prepared": [X, L, X, X, X, X, X, D, X],
    "started": [X, X, L, X, X, X, X, D, X],
    "engine loaded": [X, X, M, X, X, X, X, D, X],
    "measured": [X, X, X, R, R, X, X, D, X],
    "recalled": [X, X, X, X, X, R, X, X, X],
    "broke": [X, F, D, D, R, X, X, D, X],
    "closed": [X, X, X, X, X, X, X, U, X],
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_event_in_every_stage_is_a_move_of_the_table_or_illegal(
    stage: str, event: str
) -> None:
    expected = TABLE[event][list(STAGES).index(stage)]
    if expected is IllegalModelMoveError:
        with pytest.raises(IllegalModelMoveError, match=f"{type(EVENTS[event]).__name__} in"):
            after(STAGES[stage], EVENTS[event])
    else:
        assert type(after(STAGES[stage], EVENTS[event]).stage) is expected


def test_illegal_move_tells_the_story_so_far() -> None:
    life = ModelLife(SMALL, is_wanted=True)
    for event in (Look(), Prepared(PREPARED), Unload(), Closed()):
        life, _ = step(life, event, 0.0)
    with pytest.raises(IllegalModelMoveError) as caught:
        step(life, Measured(SPEEDS), 0.0)
    assert str(caught.value) == (
        "small: Look: Unloaded -> Preparing; Prepared: Preparing -> Loading; "
        "Unload: Loading -> Draining; Closed: Draining -> Unloaded; Measured in Unloaded"
    )


# -- waits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "kind", "seconds"),
    [
        (0, None, 5.0),
        (1, EngineFailure.CRASHED, 15.0),
        (2, EngineFailure.CRASHED, 60.0),
        (9, EngineFailure.CRASHED, 60.0),
        (0, EngineFailure.OUT_OF_MEMORY, 30.0),
        (5, EngineFailure.GPU_MEMORY_FRAGMENTED, 60.0),
    ],
)
def test_model_that_failed_is_tried_again_after_a_pause_that_grows(
    failures: int, kind: EngineFailure | None, seconds: float
) -> None:
    error = STOP if kind is None else EngineError(kind, "why")
    preparing = Preparing(Ask(failures=failures))
    life = after(preparing, Faulted("name: why", error), now=100.0)
    assert life.stage == Failed("name: why", kind, failures + 1, 100.0 + seconds)
    early, _ = step(life, Look(), 99.9 + seconds)
    assert early == life
    again, effects = step(life, Look(), 100.0 + seconds)
    assert again.stage == Preparing(Ask(failures=failures + 1, failure=kind))
    assert Prepare() in effects


def test_failures_are_counted_until_it_is_loaded() -> None:
    life = life_in(Failed("why", None, 3, retry_at=0.0))
    ready = Measuring(Ask(failures=3), RESIDENCE)
    assert isinstance(step(life, Look(), 1.0)[0].stage, Preparing)
    assert after(ready, Measured(SPEEDS)).stage == Ready(replace(RESIDENCE, last_used_at=10.0))


def test_model_nobody_wants_is_not_tried_again_and_whoever_asked_is_told() -> None:
    life, effects = step(
        life_in(Preparing(Ask(is_order=True)), is_wanted=False), EVENTS["broke"], 10.0
    )
    assert life.stage == Unloaded()
    assert LoadEnded(STOP) in effects
    assert step(life, Look(), 1e9)[0] == life


def test_engine_that_could_not_load_is_closed_before_anybody_is_told() -> None:
    life, effects = step(life_in(STAGES["loading"]), EVENTS["broke"], 10.0)
    assert effects == [CloseEngine(lets_answers_end=False, reason="failed"), Tell()]
    assert (life.phase, life.issue) == (ModelPhase.FAILED, "model_unavailable: no source has it")
    assert life.reserved_bytes == 40, "until it is closed"
    life, effects = step(life, Closed(), 11.0)
    assert effects == [LoadEnded(STOP)]
    assert (life.phase, life.reserved_bytes) == (ModelPhase.FAILED, 0)


# -- orders and what goes on by itself ------------------------------------------------------------


def test_order_makes_a_model_wanted_once_it_is_loaded_and_a_request_does_not() -> None:
    for is_order in (True, False):
        measuring = Measuring(Ask(is_order=is_order), RESIDENCE)
        assert after(measuring, Measured(SPEEDS), is_wanted=False).is_wanted is is_order


def test_second_ask_for_a_model_that_loads_counts_with_the_first() -> None:
    first, second = Ask(idle_since=5.0), Ask(is_order=True, idle_since=9.0)
    life = after(Preparing(first), Load(SMALL, second), is_wanted=False)
    assert life.stage == Preparing(Ask(is_order=True, idle_since=9.0))
    assert after(Preparing(second), Load(SMALL, Ask())).stage == Preparing(second)


def test_other_settings_end_a_load_and_begin_another() -> None:
    life, effects = step(life_in(STAGES["loading"]), EVENTS["load larger"], 10.0)
    (told,) = [effect for effect in effects if isinstance(effect, LoadEnded)]
    assert str(told.error) == "another order replaced this one"
    life, effects = step(life, Closed(), 11.0)
    assert life.stage == Preparing(Ask(is_order=True, idle_since=1.0))
    assert life.settings == LARGER
    assert effects == [Prepare()]


def test_answers_may_end_when_a_model_is_unloaded_and_only_then() -> None:
    for name, lets_answers_end in (("ready", True), ("measuring again", True), ("loading", False)):
        _, effects = step(life_in(STAGES[name]), Unload(), 10.0)
        assert CloseEngine(lets_answers_end, "order") in effects


def test_model_that_makes_room_says_for_whom() -> None:
    life, effects = step(life_in(STAGES["ready"]), Unload(room_for="large"), 10.0)
    assert CloseEngine(True, "room") in effects
    assert not life.is_wanted
    assert step(life, Closed(), 11.0)[0].stage == Unloaded(gave_room_to="large")


def test_idle_model_is_unloaded_unless_it_is_pinned_or_busy() -> None:
    long = 10.0 + 300.0
    look = Look(idle_seconds=300.0, stats=WELL)
    life = after(STAGES["ready"], look, now=long)
    assert isinstance(life.stage, Draining)
    assert not life.is_wanted
    assert isinstance(after(STAGES["ailing"], look, now=long).stage, Draining)
    assert isinstance(after(STAGES["ready"], replace(look, stats=BUSY), now=long).stage, Ready)
    assert isinstance(after(STAGES["ready"], replace(look, idle_seconds=0.0)).stage, Ready)
    pinned = replace(life_in(STAGES["ready"]), is_pinned=True)
    assert isinstance(step(pinned, look, long)[0].stage, Ready)


def test_engine_that_grows_is_counted_with_the_most_it_took() -> None:
    grown = after(STAGES["ready"], Look(stats=WELL))
    assert grown.reserved_bytes == 50
    smaller = step(grown, Look(stats=replace(WELL, resident_bytes=1)), 11.0)[0]
    assert smaller.reserved_bytes == 50


def test_sick_engine_is_shown_and_told_once() -> None:
    life, effects = step(life_in(STAGES["ready"]), Look(stats=ILL), 10.0)
    assert (life.phase, life.issue) == (ModelPhase.FAILED, "engine_crashed: why")
    assert life.failure is EngineFailure.CRASHED
    assert effects == [Tell()]
    assert step(life, Look(stats=ILL), 11.0)[1] == []


def test_another_power_mode_is_looked_up_once_a_minute() -> None:
    look = Look(stats=WELL, speeds_hold=False)
    life, effects = step(life_in(STAGES["ready"]), look, 100.0)
    assert effects == [Recall()]
    assert step(life, look, 159.0)[1] == []
    assert step(life, look, 160.0)[1] == [Recall()]
    found, _ = step(life, Recalled(SPEEDS), 101.0)
    assert step(found, look, 102.0)[1] == [Recall()], "the mode has changed once more"


def test_measuring_again_that_fails_leaves_the_speeds_and_tells_whoever_asked() -> None:
    life, effects = step(life_in(STAGES["measuring again"]), EVENTS["broke"], 10.0)
    assert isinstance(life.stage, Ready)
    assert life.known.speeds == SPEEDS
    assert effects == [MeasureEnded(STOP), LoadEnded(), Tell()]


def test_edited_model_is_known_anew_and_wanted_as_its_settings_say() -> None:
    lazy = replace(LARGER, load_at_start=False, is_pinned=True)
    life = after(STAGES["ready"], Edit(lazy, runs_alike=False))
    assert (life.known, life.is_wanted, life.is_pinned) == (Known(), False, True)
    priced = replace(SMALL, request_usd=1.0)
    assert after(STAGES["ready"], Edit(priced, runs_alike=True)).known.speeds == SPEEDS


# -- any order of events --------------------------------------------------------------------------


class Shell(RuleBasedStateMachine):
    """What `ModelHost` does with one model; each piece of work may end in any way, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.life = ModelLife(SMALL, is_wanted=True)
        self.now = 0.0
        self.work: Effect | None = None
        self.stopped: Effect | None = None
        self.has_started = False
        self.has_engine = False
        self.load_waiters = 0
        self.measure_waiters = 0
        self.is_recalling = False

    def post(self, event: Event) -> None:
        self.life, effects = step(self.life, event, self.now)
        for effect in effects:
            match effect:
                case Prepare() | StartEngine() | MeasureSpeed():
                    self.work, self.has_started = effect, False
                case CloseEngine():
                    assert not isinstance(self.work, CloseEngine), "closed once"
                    self.stopped, self.work = self.work, effect
                case LoadEnded():
                    self.load_waiters = 0
                case MeasureEnded():
                    self.measure_waiters = 0
                case Recall():
                    self.is_recalling = True
                case Tell():
                    pass
                case _:
                    assert_never(effect)

    def end(self, event: Event) -> None:
        """A piece of work ends; what it leads to may begin the next one."""
        self.work = None
        self.post(event)

    # what somebody asks for

    @rule(
        wanted=st.sampled_from([SMALL, LARGER]),
        is_order=st.booleans(),
        idle_since=st.none() | st.floats(0.0, 100.0),
    )
    def load(self, wanted: ModelSettings, is_order: bool, idle_since: float | None) -> None:
        self.post(Load(wanted, Ask(is_order, idle_since)))
        if not isinstance(self.life.stage, Ready | Ailing):
            self.load_waiters += 1

    @rule(room_for=st.sampled_from(["", "other"]))
    def unload(self, room_for: str) -> None:
        self.post(Unload(room_for))

    @rule(entry=st.sampled_from([SMALL, LARGER, replace(SMALL, load_at_start=False)]))
    def edit(self, entry: ModelSettings) -> None:
        self.post(Edit(entry, runs_alike=entry.slots == self.life.settings.slots))

    @rule(is_pinned=st.booleans())
    def pin(self, is_pinned: bool) -> None:
        self.post(Pin(is_pinned))

    @precondition(lambda self: isinstance(self.life.stage, Ready))
    @rule()
    def measure(self) -> None:
        self.post(Measure())
        self.measure_waiters += 1

    @precondition(lambda self: isinstance(self.life.stage, Ready))
    @rule()
    def use(self) -> None:
        self.post(Used(self.now))

    @precondition(lambda self: self.is_recalling and isinstance(self.life.stage, Ready))
    @rule()
    def recall(self) -> None:
        self.is_recalling = False
        self.post(Recalled(SPEEDS))

    # what goes on by itself

    @rule(
        seconds=st.floats(0.0, 100.0),
        stats=st.sampled_from([WELL, BUSY, ILL]),
        idle_seconds=st.sampled_from([0.0, 50.0]),
        speeds_hold=st.booleans(),
    )
    def look(
        self, seconds: float, stats: EngineStats, idle_seconds: float, speeds_hold: bool
    ) -> None:
        self.now += seconds
        self.post(Look(idle_seconds, stats if self.life.is_serving else None, speeds_hold))

    @precondition(lambda self: isinstance(self.work, Prepare | MeasureSpeed))
    @rule()
    def report(self) -> None:
        self.post(Reported("half of it", 0.5, is_downloading=True))

    @precondition(lambda self: isinstance(self.work, StartEngine) and not self.has_started)
    @rule()
    def start(self) -> None:
        self.post(Started(40, "loading"))
        assert not self.has_engine, "one engine at a time"
        self.has_started = self.has_engine = True

    @precondition(lambda self: self.work is not None)
    @rule()
    def end_well(self) -> None:
        match self.work:
            case Prepare():
                self.end(Prepared(PREPARED))
            case StartEngine():
                if not self.has_started:
                    self.start()
                self.end(EngineLoaded(LOADED, 40))
            case MeasureSpeed():
                self.end(Measured(SPEEDS))
            case CloseEngine():
                self.has_engine, self.stopped = False, None
                self.end(Closed())

    @precondition(lambda self: isinstance(self.work, Prepare | StartEngine | MeasureSpeed))
    @rule(kind=st.sampled_from([None, *EngineFailure]))
    def end_badly(self, kind: EngineFailure | None) -> None:
        self.end(Faulted("name: why", STOP if kind is None else EngineError(kind, "why")))

    @precondition(lambda self: self.stopped is not None)
    @rule(is_well=st.booleans())
    def stopped_work_has_a_last_word(self, is_well: bool) -> None:
        ends: dict[type, Event] = {
            Prepare: Prepared(PREPARED),
            StartEngine: EngineLoaded(LOADED, 40),
            MeasureSpeed: Measured(SPEEDS),
        }
        self.post(ends[type(self.stopped)] if is_well else Faulted("name: why", STOP))
        self.stopped = None

    # what always holds

    @invariant()
    def the_work_is_that_of_the_stage(self) -> None:
        expected = {
            Preparing: Prepare,
            Loading: StartEngine,
            Measuring: MeasureSpeed,
            Draining: CloseEngine,
        }.get(type(self.life.stage))
        assert self.work is None if expected is None else isinstance(self.work, expected)

    @invariant()
    def an_engine_is_there_when_the_stage_says_so_and_closed_otherwise(self) -> None:
        match self.life.stage:
            case Unloaded() | Preparing() | Failed():
                assert not self.has_engine
                assert self.life.reserved_bytes == 0
            case Measuring() | Ready() | Ailing():
                assert self.has_engine
                assert self.life.reserved_bytes >= 40

    @invariant()
    def whoever_waits_is_told_in_the_end(self) -> None:
        match self.life.stage:
            case Unloaded() | Ready() | Ailing() | Failed():
                assert self.load_waiters == 0
            case Draining(after=gone, error=error) if self.load_waiters:
                assert isinstance(gone, Ask) or error is not None
        is_measured_again = isinstance(self.life.stage, Measuring) and self.life.stage.ask is None
        assert is_measured_again or self.measure_waiters == 0

    @invariant()
    def what_is_tried_again_is_wanted(self) -> None:
        if isinstance(self.life.stage, Failed):
            assert self.life.is_wanted

    def teardown(self) -> None:
        """Left alone, a wanted model is Ready in the end; whoever waits has been told."""
        for _ in range(12):
            if self.work is not None:
                self.end_well()
            else:
                self.look(100.0, WELL, 0.0, True)
        assert isinstance(self.life.stage, Ready if self.life.is_wanted else Ready | Unloaded)
        assert self.load_waiters == self.measure_waiters == 0
        # Let down each time, it is tried again after a pause, and has no engine meanwhile.
        self.post(Edit(replace(LARGER, threads=1), runs_alike=False))
        self.end_well()
        for _ in range(12):
            if isinstance(self.work, CloseEngine):
                self.end_well()
            elif self.work is not None:
                self.end_badly(None)
            elif isinstance(self.life.stage, Failed):
                break
            else:
                self.look(0.0, WELL, 0.0, True)
        assert isinstance(self.life.stage, Failed)
        assert self.life.stage.retry_at > self.now
        assert not self.has_engine


Shell.TestCase.settings = hypothesis_settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # of a busy machine
)
test_any_order_of_events_is_legal_and_leaves_no_engine_behind = Shell.TestCase
