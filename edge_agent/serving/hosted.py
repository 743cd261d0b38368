"""What is known of one model of this node."""

from collections.abc import Sequence
from dataclasses import dataclass

from edge_agent.config import ModelSettings
from edge_agent.engine.base import InferenceEngine, LoadedModel
from edge_agent.engine.registry import ENGINES, SpecOf, spec_of
from edge_agent.engine.spec import EngineSpec, PreparedModel
from edge_agent.errors import EngineFailure
from edge_agent.lifecycle import ModelPhase
from edge_agent.serving.calibrations import Speeds


@dataclass(slots=True)
class HostedModel:
    """One model of this node; `issue` says what is wrong, or what is being done.

    Attributes:
        is_wanted: loaded, and loaded again, without anybody asking.
        is_pinned: never unloaded to make room or for being idle.
        is_measuring: its speed is being measured; what comes meanwhile waits.
        progress_ratio: of the download, 0 to 1; None when nobody knows.
        reserved_bytes: what it is counted with in the memory budget; 0 while it has none.
        last_used_at: when it last had a request or was loaded, monotonic seconds.
        gave_room_to: the model for which it was unloaded; empty when it was not, or is back.
        failure: of its engine, now or at the last try; None while all is well.
        failures: loads that failed in a row.
        retry_at: not loaded by itself before this, monotonic seconds.
        engines: kinds of engine that it can have.
    """

    settings: ModelSettings
    phase: ModelPhase = ModelPhase.LOADING
    issue: str = ""
    prepared: PreparedModel | None = None
    loaded: LoadedModel | None = None
    speeds: Speeds | None = None
    engine: InferenceEngine | None = None
    is_wanted: bool = True
    is_pinned: bool = False
    is_measuring: bool = False
    progress_ratio: float | None = None
    reserved_bytes: int = 0
    last_used_at: float = 0.0
    gave_room_to: str = ""
    failure: EngineFailure | None = None
    failures: int = 0
    retry_at: float = 0.0
    engines: Sequence[SpecOf] = ENGINES

    @property
    def is_ready(self) -> bool:
        """Whether it can answer."""
        return self.phase is ModelPhase.READY and self.engine is not None

    @property
    def spec(self) -> EngineSpec:
        """The kind of engine that runs it."""
        return spec_of(self.settings, self.engines)

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
        settings,
        phase=ModelPhase.LOADING if settings.load_at_start else ModelPhase.UNLOADED,
        is_wanted=settings.load_at_start,
        is_pinned=settings.is_pinned,
        engines=engines,
    )
