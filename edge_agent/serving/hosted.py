"""One model of this node: where it is in its life, and its engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from edge_agent.config import ModelSettings
from edge_agent.engine.base import InferenceEngine, LoadedModel
from edge_agent.engine.registry import ENGINES, SpecOf, spec_of
from edge_agent.engine.spec import EngineSpec, PreparedModel
from edge_agent.errors import EngineFailure
from edge_agent.serving.calibrations import Speeds
from edge_agent.serving.lifecycle import (
    Effect,
    Event,
    Measuring,
    ModelLife,
    ModelPhase,
    Preparing,
    Ready,
    Unloaded,
    Used,
    step,
)


@dataclass(slots=True)
class HostedModel:
    """What others ask of a model; all of it follows from its life and from its engine's own word.

    Attributes:
        life: see `lifecycle`.
        engines: kinds of engine that it can have.
        made: its engine, from when it was made until it is closed.
    """

    life: ModelLife
    engines: Sequence[SpecOf] = ENGINES
    made: InferenceEngine | None = None

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take an event into account; what is returned is for the caller to carry out.

        Raises:
            IllegalMoveError: it cannot come now.
        """
        self.life, effects = step(self.life, event, now)
        return effects

    def used(self, at: float) -> None:
        """Note that a request goes to its engine; it is ready. `at` is in monotonic seconds."""
        self.step(Used(at), at)

    @property
    def name(self) -> str:
        """Of the model."""
        return self.life.settings.name

    @property
    def settings(self) -> ModelSettings:
        """Its entry in the settings, as orders have changed it."""
        return self.life.settings

    @property
    def spec(self) -> EngineSpec:
        """The kind of engine that runs it."""
        return spec_of(self.settings, self.engines)

    @property
    def phase(self) -> ModelPhase:
        """Where it is, as the controller is told."""
        return self.life.phase

    @property
    def issue(self) -> str:
        """What is wrong with it, or what is being done."""
        return self.life.issue

    @property
    def failure(self) -> EngineFailure | None:
        """Of its engine, now or at the last try; None while all is well."""
        return self.life.failure

    @property
    def progress_ratio(self) -> float | None:
        """Of the download, 0 to 1; None when nobody knows."""
        stage = self.life.stage
        return stage.progress_ratio if isinstance(stage, Preparing) else None

    @property
    def prepared(self) -> PreparedModel | None:
        """What is known of it before it is loaded."""
        return self.life.known.prepared

    @property
    def loaded(self) -> LoadedModel | None:
        """What its engine has learned, even if it is unloaded now."""
        return self.life.known.loaded

    @property
    def speeds(self) -> Speeds | None:
        """As last measured, even if it is unloaded now."""
        return self.life.known.speeds

    @property
    def is_wanted(self) -> bool:
        """Whether it is loaded, and loaded again, without anybody asking."""
        return self.life.is_wanted

    @property
    def is_pinned(self) -> bool:
        """Whether it is kept from being unloaded to make room or for being idle."""
        return self.life.is_pinned

    @property
    def is_ready(self) -> bool:
        """Whether it can answer."""
        return isinstance(self.life.stage, Ready)

    @property
    def is_measuring(self) -> bool:
        """Whether its speed is being measured again; what comes meanwhile waits."""
        stage = self.life.stage
        return isinstance(stage, Measuring) and stage.ask is None

    @property
    def gave_room_to(self) -> str:
        """The model for which it was unloaded; empty when it was not, or is back."""
        stage = self.life.stage
        return stage.gave_room_to if isinstance(stage, Unloaded) else ""

    @property
    def reserved_bytes(self) -> int:
        """What it is counted with in the memory budget."""
        return self.life.reserved_bytes

    @property
    def last_used_at(self) -> float:
        """When it last had a request or was loaded, monotonic seconds; 0 while it is not loaded."""
        residence = self.life.residence
        return 0.0 if residence is None else residence.last_used_at

    @property
    def engine(self) -> InferenceEngine | None:
        """Its engine, once it answers or has answered; None while it is first loaded."""
        return self.made if self.life.is_serving else None

    @property
    def refuses_raw_prompts(self) -> bool:
        """Whether only chats are answered, as far as it is known."""
        if self.engine is None:
            return not self.spec.takes_raw_prompts
        return not self.engine.stats().takes_raw_prompts

    @property
    def has_requests(self) -> bool:
        """Whether its engine has something to do."""
        if self.engine is None:
            return False
        stats = self.engine.stats()
        return stats.busy_slots + stats.queued_requests > 0

    @property
    def resident_bytes(self) -> int | None:
        """Memory that its process takes now; None when it has none, or nobody knows."""
        return None if self.engine is None else self.engine.stats().resident_bytes


def new_hosted(settings: ModelSettings, engines: Sequence[SpecOf] = ENGINES) -> HostedModel:
    """A model as the settings have it, before anything was done for it."""
    return HostedModel(
        ModelLife(settings, is_wanted=settings.load_at_start, is_pinned=settings.is_pinned), engines
    )
