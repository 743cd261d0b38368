"""The life of one model on this node, as a machine: `step(life, event, now) -> (life, effects)`.

Pure: the shell (`models.py`) tells what happened and carries out what is asked for. A stage is all
there is to know of where a model is; what the controller and `edge-agent status` are told follows
from it.

The legal moves; a stage that an event is not listed with does not know it:

    Unloaded   Load, Look w: Preparing. Unload, Edit: Unloaded.
    Preparing  Prepared: Loading. Faulted: Failed u. Load o: Preparing. Unload, Edit: Draining.
    Loading    EngineLoaded: Measuring. Faulted: Draining. Load o: Loading. Unload, Edit: Draining.
    Measuring  Measured: Ready. Faulted: Draining b. Load o: Measuring. Unload, Edit: Draining.
    Ready      Look: Ailing, Draining i. Measure: Measuring. Load o: Ready. Unload, Edit: Draining.
    Ailing     Look: Ready, Draining i. Load o: Ailing. Unload, Edit: Draining.
    Draining   Closed: Unloaded, Failed or Preparing. Load, Unload, Edit: Draining, for that end.
    Failed     Load, Look t: Preparing. Unload, Edit: Unloaded.

- w: when it is wanted. t: when the pause after the failure is over. i: when it was idle for too
  long and is not pinned.
- o: with other settings it is Draining, and then Preparing.
- u: Unloaded when nobody wants it; whoever asked for it is told the reason.
- b: one that has answered before is Ready, and goes on with the speeds that it had.

Look, Pin, and Edit that changes nothing of how the model is run, are legal in each stage. Reported
is legal while Preparing and Measuring, Started while Loading, Recalled and Used while Ready; none
of them changes the stage. Draining ignores what work still says that has been told to stop. Any
other move raises `IllegalModelMoveError` with the story so far.
"""

import enum
from dataclasses import dataclass, field, replace
from typing import Final

from typing_extensions import assert_never

from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineStats, LoadedModel
from edge_agent.engine.spec import PreparedModel
from edge_agent.errors import AgentError, EngineError, EngineFailure, ModelError
from edge_agent.serving.calibrations import Speeds

_RETRY_SECONDS: Final = (5.0, 15.0, 60.0)
"""Waits before a model that could not be loaded is tried again; the last one repeats."""

_MEMORY_RETRY_SECONDS: Final = 30.0
"""The least of those waits after a want of memory, which ends when others give some back."""

_REMEASURE_SECONDS: Final = 60.0
"""Between two tries to measure a model because the board's power mode has changed."""

_STORY_MOVES: Final = 20

MEASURING: Final = "measuring its speed"


class ModelPhase(enum.Enum):
    """Where a model is in its life, as the controller is told."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    # It can be loaded by an order or a request, and answers nothing now.
    UNLOADED = "unloaded"
    DOWNLOADING = "downloading"


# -- stages ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Why a model is being loaded.

    Attributes:
        is_order: it is wanted from then on; a request or the node itself changes nothing of that.
        idle_since: models that were last used at or before this moment may have to make room,
            monotonic seconds; None takes nobody's room.
        failures: loads that failed in a row before this one.
        failure: of the engine at the last try; None when that went well or was no engine's.
    """

    is_order: bool = False
    idle_since: float | None = None
    failures: int = 0
    failure: EngineFailure | None = None

    def with_another(self, other: "Ask") -> "Ask":
        """Both at once: the more generous of each."""
        moments = [moment for moment in (self.idle_since, other.idle_since) if moment is not None]
        return replace(
            self,
            is_order=self.is_order or other.is_order,
            idle_since=max(moments) if moments else None,
        )


@dataclass(frozen=True, slots=True)
class Residence:
    """What a loaded engine takes and when it was of use.

    Attributes:
        reserved_bytes: what it is counted with in the memory budget.
        last_used_at: when it last had a request or was loaded, monotonic seconds.
        remeasure_at: not measured for another power mode before this, monotonic seconds.
    """

    reserved_bytes: int
    last_used_at: float
    remeasure_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Without an engine, on purpose or because nobody wants it.

    Attributes:
        gave_room_to: the model for which it was unloaded; empty when it was not.
        failure: of its engine at the last try.
    """

    gave_room_to: str = ""
    failure: EngineFailure | None = None


@dataclass(frozen=True, slots=True)
class Preparing:
    """Its file is being fetched or verified.

    Attributes:
        progress_ratio: of the download, 0 to 1; None when nobody knows.
    """

    ask: Ask
    text: str = ""
    progress_ratio: float | None = None
    is_downloading: bool = False


@dataclass(frozen=True, slots=True)
class Loading:
    """Its engine waits for its turn, makes room, or loads."""

    ask: Ask
    text: str = ""
    reserved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Measuring:
    """Its engine is loaded, and its speed is being measured; what comes meanwhile waits.

    Attributes:
        ask: why it was loaded; None when it has answered before and is measured again.
    """

    ask: Ask | None
    residence: Residence
    text: str = MEASURING


@dataclass(frozen=True, slots=True)
class Ready:
    """It answers. `issue` is what an operator should know all the same."""

    residence: Residence
    issue: str = ""
    failure: EngineFailure | None = None


@dataclass(frozen=True, slots=True)
class Ailing:
    """Its engine is loaded and cannot answer now; it mends itself, or says what it needs."""

    residence: Residence
    issue: str
    failure: EngineFailure | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """It could not be loaded, and is tried again.

    Attributes:
        failures: in a row.
        retry_at: monotonic seconds.
    """

    issue: str
    failure: EngineFailure | None
    failures: int
    retry_at: float


@dataclass(frozen=True, slots=True)
class Draining:
    """What is being done for it is stopped; then its engine, if it has one, is closed.

    Attributes:
        after: what it is then; with an Ask it is prepared again.
        lets_answers_end: it has answered, and answers that run may end.
        reserved_bytes: its engine's, until that is closed.
        text: what is being done.
        error: for those who wait for it to be loaded, once it is closed.
    """

    after: Unloaded | Failed | Ask
    lets_answers_end: bool
    reserved_bytes: int = 0
    text: str = ""
    error: AgentError | None = None


Stage = Unloaded | Preparing | Loading | Measuring | Ready | Ailing | Draining | Failed


@dataclass(frozen=True, slots=True)
class Known:
    """What was learned of a model; kept while it is unloaded, so that routing can plan with it."""

    prepared: PreparedModel | None = None
    loaded: LoadedModel | None = None
    speeds: Speeds | None = None


@dataclass(frozen=True, slots=True)
class ModelLife:
    """One model of this node.

    Attributes:
        is_wanted: loaded, and loaded again, without anybody asking.
        is_pinned: never unloaded to make room or for being idle.
        story: the last moves between stages.
    """

    settings: ModelSettings
    is_wanted: bool
    is_pinned: bool = False
    stage: Stage = field(default_factory=Unloaded)
    known: Known = field(default_factory=Known)
    story: tuple[str, ...] = ()

    @property
    def phase(self) -> ModelPhase:
        """What the controller is told of the stage."""
        match self.stage:
            case Unloaded():
                return ModelPhase.LOADING if self.is_wanted else ModelPhase.UNLOADED
            case Preparing(is_downloading=True):
                return ModelPhase.DOWNLOADING
            case Preparing() | Loading() | Measuring():
                return ModelPhase.LOADING
            case Ready():
                return ModelPhase.READY
            case Ailing() | Failed() | Draining(after=Failed()):
                return ModelPhase.FAILED
            case Draining(after):
                is_gone = isinstance(after, Unloaded)
                return ModelPhase.UNLOADED if is_gone else ModelPhase.LOADING
            case _:
                assert_never(self.stage)

    @property
    def issue(self) -> str:
        """What is wrong, or what is being done."""
        match self.stage:
            case Unloaded():
                return ""
            case Draining(after=Failed(issue)):
                return issue
            case Preparing() | Loading() | Measuring() | Draining():
                return self.stage.text
            case Ready() | Ailing() | Failed():
                return self.stage.issue
            case _:
                assert_never(self.stage)

    @property
    def failure(self) -> EngineFailure | None:
        """Of its engine, now or at the last try; None while all is well."""
        match self.stage:
            case Preparing(ask) | Loading(ask) | Draining(after=Ask() as ask):
                return ask.failure
            case Measuring(ask):
                return None if ask is None else ask.failure
            case Draining(after=(Unloaded() | Failed()) as after):
                return after.failure
            case Unloaded() | Ready() | Ailing() | Failed():
                return self.stage.failure
            case _:
                return None

    @property
    def residence(self) -> Residence | None:
        """Of its engine, while that is loaded and not being closed."""
        match self.stage:
            case Measuring() | Ready() | Ailing():
                return self.stage.residence
            case _:
                return None

    @property
    def reserved_bytes(self) -> int:
        """What it is counted with in the memory budget; 0 while it has no engine."""
        match self.stage:
            case Loading() | Draining():
                return self.stage.reserved_bytes
            case _:
                return 0 if self.residence is None else self.residence.reserved_bytes

    @property
    def is_serving(self) -> bool:
        """Whether its engine has answers, or may have them."""
        match self.stage:
            case Ready() | Ailing() | Measuring(ask=None) | Draining(lets_answers_end=True):
                return True
            case _:
                return False


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Somebody asks for the model, with these settings."""

    settings: ModelSettings
    ask: Ask


@dataclass(frozen=True, slots=True)
class Unload:
    """It is not wanted any more; `room_for` is the model that takes its room, if that is why."""

    room_for: str = ""


@dataclass(frozen=True, slots=True)
class Edit:
    """Its settings were edited; `runs_alike` says that how it is run stays the same."""

    settings: ModelSettings
    runs_alike: bool


@dataclass(frozen=True, slots=True)
class Pin:
    """It is to be kept from being unloaded to make room or for being idle, or no longer."""

    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Used:
    """A request goes to its engine; `at` is in monotonic seconds."""

    at: float


@dataclass(frozen=True, slots=True)
class Measure:
    """Its speed is to be measured again, now."""


@dataclass(frozen=True, slots=True)
class Look:
    """Time has passed.

    Attributes:
        idle_seconds: of the settings; 0 unloads nothing for being idle.
        stats: of its engine while it is serving; None otherwise.
        speeds_hold: False when they were measured in another power mode.
    """

    idle_seconds: float = 0.0
    stats: EngineStats | None = None
    speeds_hold: bool = True


@dataclass(frozen=True, slots=True)
class Reported:
    """How the work goes, in words."""

    text: str
    progress_ratio: float | None = None
    is_downloading: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """Its file is there."""

    model: PreparedModel


@dataclass(frozen=True, slots=True)
class Started:
    """There is room for it, and its engine begins to load."""

    reserved_bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    """Its engine has loaded it."""

    model: LoadedModel
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Its speed is known."""

    speeds: Speeds


@dataclass(frozen=True, slots=True)
class Recalled:
    """Its speed in this power mode is known from before."""

    speeds: Speeds


@dataclass(frozen=True, slots=True)
class Faulted:
    """Preparing, loading or measuring it has failed; `issue` has a name, a colon and the reason."""

    issue: str
    error: AgentError


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing is being done for it any more, and its engine is gone."""


Event = (
    Load
    | Unload
    | Edit
    | Pin
    | Used
    | Measure
    | Look
    | Reported
    | Prepared
    | Started
    | EngineLoaded
    | Measured
    | Recalled
    | Faulted
    | Closed
)


# -- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have its file ready; ends with Prepared or Faulted."""


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Make room, make an engine and load it; ends with EngineLoaded or Faulted."""


@dataclass(frozen=True, slots=True)
class MeasureSpeed:
    """Find out its speed; ends with Measured or Faulted.

    Attributes:
        is_fresh: measure in any case, once running answers have ended; otherwise what was measured
            before under the same conditions will do.
    """

    is_fresh: bool


@dataclass(frozen=True, slots=True)
class CloseEngine:
    """Stop what is being done for it, then close its engine if it has one; ends with Closed.

    Attributes:
        lets_answers_end: wait for them, as long as the settings say.
        reason: order, room, idle, edited, failed or reload; for the log.
    """

    lets_answers_end: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Recall:
    """Look up its speed in the power mode that the board has now, or have it measured."""


@dataclass(frozen=True, slots=True)
class Tell:
    """What the controller and others are told has changed."""


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """Whoever waits for it to be loaded is told; None is well."""

    error: AgentError | None = None


@dataclass(frozen=True, slots=True)
class MeasureEnded:
    """Whoever waits for it to be measured is told; None is well."""

    error: AgentError | None = None


Effect = (
    Prepare | StartEngine | MeasureSpeed | CloseEngine | Recall | Tell | LoadEnded | MeasureEnded
)

Move = tuple[ModelLife, list[Effect]]


class IllegalModelMoveError(Exception):
    """An event that cannot come in this stage: a fault of the shell."""

    def __init__(self, life: ModelLife, event: Event) -> None:
        told = "; ".join((*life.story, f"{type(event).__name__} in {type(life.stage).__name__}"))
        super().__init__(f"{life.settings.name}: {told}")


def step(life: ModelLife, event: Event, now: float) -> Move:
    """What an event makes of a model, and what is to be done about it.

    Args:
        now: monotonic seconds.

    Raises:
        IllegalModelMoveError: the table at the head of this module does not have it.
    """
    after, effects = _moved(life, event, now)
    if type(after.stage) is not type(life.stage):
        names = (type(event).__name__, type(life.stage).__name__, type(after.stage).__name__)
        move = "{}: {} -> {}".format(*names)
        after = replace(after, story=(*life.story, move)[-_STORY_MOVES:])
    if _shown(after) != _shown(life):
        effects = [*effects, Tell()]
    return after, effects


def _shown(life: ModelLife) -> tuple[object, ...]:
    ratio = life.stage.progress_ratio if isinstance(life.stage, Preparing) else None
    return life.phase, life.issue, ratio, life.is_pinned, life.settings


def _moved(life: ModelLife, event: Event, now: float) -> Move:
    match event:
        case Load():
            return _load(life, event)
        case Unload(room_for):
            unwanted = replace(life, is_wanted=False)
            reason = "room" if room_for else "order"
            return _leave(unwanted, Unloaded(room_for, life.failure), reason)
        case Edit():
            return _edit(life, event)
        case Pin(is_pinned):
            return replace(life, is_pinned=is_pinned), []
        case Look():
            return _look(life, event, now)
        case Used() | Measure() | Recalled():
            if isinstance(life.stage, Ready):
                return _while_ready(life, life.stage, event)
        case Closed():
            if isinstance(life.stage, Draining):
                return _closed(life, life.stage)
        case Reported() | Prepared() | Started() | EngineLoaded() | Measured() | Faulted():
            if isinstance(life.stage, Draining):
                return life, []  # it had been told to stop
            return _work(life, event, now)
        case _:
            assert_never(event)
    raise IllegalModelMoveError(life, event)


def _load(life: ModelLife, event: Load) -> Move:
    ask, stage = event.ask, life.stage
    match stage:
        case Unloaded(failure=failure):
            ask = replace(ask, failure=failure)
            return replace(life, settings=event.settings, stage=Preparing(ask)), [Prepare()]
        case Failed(failure=failure, failures=failures):
            ask = replace(ask, failure=failure, failures=failures)
            return replace(life, settings=event.settings, stage=Preparing(ask)), [Prepare()]
        case Draining(after=after, error=error):
            match after:
                case Ask():
                    ask = after.with_another(ask)
                case Failed():
                    ask = replace(ask, failure=after.failure, failures=after.failures)
                case Unloaded():
                    ask = replace(ask, failure=after.failure)
            # Those who waited before are told now, or they would hear how this load goes.
            told: list[Effect] = [] if error is None else [LoadEnded(error)]
            draining = replace(stage, after=ask, error=None)
            return replace(life, settings=event.settings, stage=draining), told
        case Preparing() | Loading() | Measuring() | Ready() | Ailing():
            if event.settings != life.settings:
                again = replace(life, settings=event.settings)
                return _leave(again, ask, "reload")
            match stage:
                case Preparing(ask=found) | Loading(ask=found):
                    joined = replace(stage, ask=found.with_another(ask))
                    return replace(life, stage=joined), []
                case Measuring(ask=Ask() as found):
                    return replace(life, stage=replace(stage, ask=found.with_another(ask))), []
            return replace(life, is_wanted=life.is_wanted or ask.is_order), []
        case _:
            assert_never(stage)


def _leave(life: ModelLife, after: Unloaded | Failed | Ask, reason: str) -> Move:
    """Stop what is being done for a model and close its engine; then it is `after`."""
    replaced = ModelError("another order replaced this one")
    match life.stage:
        case Unloaded(gave_room_to) if isinstance(after, Unloaded):
            gone = Unloaded(after.gave_room_to or gave_room_to, after.failure)
            return replace(life, stage=gone), []
        case Unloaded() | Failed():
            assert not isinstance(after, Ask)  # `_load` begins those
            return replace(life, stage=after), []
        case Draining(after=before) as stage:
            error = replaced if isinstance(before, Ask) else stage.error
            return replace(life, stage=replace(stage, after=after, error=error)), []
        case Preparing() | Loading() | Measuring() | Ready() | Ailing() as stage:
            is_serving = life.is_serving
            draining = Draining(
                after,
                lets_answers_end=is_serving,
                reserved_bytes=life.reserved_bytes,
                text="letting its running answers end" if is_serving else "",
                error=None if isinstance(stage, Ready | Ailing) else replaced,
            )
            effects: list[Effect] = [CloseEngine(is_serving, reason)]
            if isinstance(stage, Measuring) and stage.ask is None:
                effects.append(MeasureEnded(replaced))
            if isinstance(after, Ask) and draining.error is not None:
                # They would hear how the next load goes.
                effects.append(LoadEnded(draining.error))
                draining = replace(draining, error=None)
            return replace(life, stage=draining), effects
        case _:
            assert_never(life.stage)


def _edit(life: ModelLife, event: Edit) -> Move:
    settings = event.settings
    edited = replace(life, settings=settings, is_pinned=settings.is_pinned)
    if event.runs_alike:
        return edited, []
    edited = replace(edited, is_wanted=settings.load_at_start, known=Known())
    return _leave(edited, Unloaded(), "edited")


def _look(life: ModelLife, event: Look, now: float) -> Move:
    match life.stage:
        case Unloaded(failure=failure) if life.is_wanted:
            return replace(life, stage=Preparing(Ask(failure=failure))), [Prepare()]
        case Failed(failure=failure, failures=failures, retry_at=retry_at) if now >= retry_at:
            ask = Ask(failure=failure, failures=failures)
            return replace(life, stage=Preparing(ask)), [Prepare()]
        case Ready(residence) | Ailing(residence):
            return _look_at_engine(life, event, residence, now)
        case _:
            return life, []


def _look_at_engine(life: ModelLife, event: Look, residence: Residence, now: float) -> Move:
    stats = event.stats
    if stats is not None:
        is_busy = stats.busy_slots + stats.queued_requests > 0
        residence = replace(
            residence,
            reserved_bytes=max(residence.reserved_bytes, stats.resident_bytes or 0),
            last_used_at=now if is_busy else residence.last_used_at,
        )
        stage: Ready | Ailing = (
            Ready(residence, stats.issue or _template_issue(life), stats.failure)
            if stats.is_ready
            else Ailing(residence, stats.issue or _template_issue(life), stats.failure)
        )
        life = replace(life, stage=stage)
    is_idle = event.idle_seconds > 0 and now - residence.last_used_at >= event.idle_seconds
    if is_idle and not life.is_pinned:
        return _leave(replace(life, is_wanted=False), Unloaded(), "idle")
    is_due = now >= residence.remeasure_at and not event.speeds_hold
    if isinstance(life.stage, Ready) and is_due:
        residence = replace(residence, remeasure_at=now + _REMEASURE_SECONDS)
        return replace(life, stage=replace(life.stage, residence=residence)), [Recall()]
    return life, []


def _while_ready(life: ModelLife, stage: Ready, event: Used | Measure | Recalled) -> Move:
    match event:
        case Used(at):
            residence = replace(stage.residence, last_used_at=at)
            return replace(life, stage=replace(stage, residence=residence)), []
        case Measure():
            text = "waiting until its answers have ended"
            measuring = Measuring(None, stage.residence, text)
            return replace(life, stage=measuring), [MeasureSpeed(is_fresh=True)]
        case Recalled(speeds):
            residence = replace(stage.residence, remeasure_at=0.0)
            known = replace(life.known, speeds=speeds)
            return replace(life, stage=replace(stage, residence=residence), known=known), [Tell()]
        case _:
            assert_never(event)


Work = Reported | Prepared | Started | EngineLoaded | Measured | Faulted


def _work(life: ModelLife, event: Work, now: float) -> Move:
    match life.stage, event:
        case Preparing(ask), Reported(text, ratio, is_downloading):
            return replace(life, stage=Preparing(ask, text, ratio, is_downloading)), []
        case Measuring() as stage, Reported(text):
            return replace(life, stage=replace(stage, text=text)), []
        case Preparing(ask, text), Prepared(model):
            known = replace(life.known, prepared=model)
            return replace(life, stage=Loading(ask, text), known=known), [StartEngine()]
        case Loading(ask), Started(reserved_bytes, text):
            return replace(life, stage=Loading(ask, text, reserved_bytes)), []
        case Loading(ask), EngineLoaded(model, reserved_bytes):
            measuring = Measuring(ask, Residence(reserved_bytes, now))
            known = replace(life.known, loaded=model)
            return replace(life, stage=measuring, known=known), [MeasureSpeed(is_fresh=False)]
        case Measuring(ask, residence), Measured(speeds):
            known = replace(life.known, speeds=speeds)
            return _ready(replace(life, known=known), ask, residence, now, None)
        case Measuring(None, residence), Faulted(_, error):
            return _ready(life, None, residence, now, error)
        case Preparing(ask), Faulted():
            gone = _given_up(life, ask, event, now)
            return replace(life, stage=gone), [LoadEnded(event.error)]
        case ((Loading(ask) | Measuring(ask)), Faulted()):
            assert ask is not None
            draining = Draining(
                _given_up(life, ask, event, now),
                lets_answers_end=False,
                reserved_bytes=life.reserved_bytes,
                error=event.error,
            )
            return replace(life, stage=draining), [CloseEngine(False, "failed")]
    raise IllegalModelMoveError(life, event)


def _ready(
    life: ModelLife,
    ask: Ask | None,
    residence: Residence,
    now: float,
    error: AgentError | None,
) -> Move:
    """It answers: for the first time with `ask`, or again after measuring without."""
    if ask is not None:
        life = replace(life, is_wanted=life.is_wanted or ask.is_order)
        residence = replace(residence, last_used_at=now)
    ready = replace(life, stage=Ready(residence, _template_issue(life)))
    measured: list[Effect] = [] if ask is not None else [MeasureEnded(error)]
    return ready, [*measured, LoadEnded()]


def _given_up(life: ModelLife, ask: Ask, event: Faulted, now: float) -> Unloaded | Failed:
    error = event.error
    failure = error.kind if isinstance(error, EngineError) else None
    if not life.is_wanted:  # whoever asked is told; nobody else misses it
        return Unloaded(failure=failure)
    pause = _RETRY_SECONDS[min(ask.failures, len(_RETRY_SECONDS) - 1)]
    if failure is not None and failure.is_want_of_memory:
        pause = max(pause, _MEMORY_RETRY_SECONDS)
    return Failed(event.issue, failure, ask.failures + 1, now + pause)


def _closed(life: ModelLife, stage: Draining) -> Move:
    told: list[Effect] = [] if stage.error is None else [LoadEnded(stage.error)]
    match stage.after:
        case Ask() as ask:
            return replace(life, stage=Preparing(ask)), [*told, Prepare()]
        case Unloaded() | Failed() as after:
            return replace(life, stage=after), told
        case _:
            assert_never(stage.after)


def _template_issue(life: ModelLife) -> str:
    return (life.known.loaded.template_issue if life.known.loaded else None) or ""
