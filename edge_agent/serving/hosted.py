"""What is known of one model of this node."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineSettings, InferenceEngine, LoadedModel
from edge_agent.engine.remote.endpoint import RemoteError
from edge_agent.errors import AgentError, EngineError, EngineFailure, MemoryBudgetError
from edge_agent.lifecycle import ModelPhase
from edge_agent.serving.calibrations import Speeds


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A verified file and what the catalogue says of it, or a remote model and its settings.

    Attributes:
        path: None for a remote model.
        digest: of the file; for a remote model of where it is.
        context_tokens: 0 for a remote model whose settings do not say.
        chat_template: overrides the file's own; None uses the file's.
        is_base_model: not tuned to follow instructions.
    """

    path: Path | None
    digest: str
    family: str
    parameters_billions: float
    quantisation: str
    context_tokens: int
    chat_template: str | None
    is_base_model: bool = False


class Report(Protocol):
    """Is told how the preparation of a model goes."""

    def __call__(
        self, text: str, progress_ratio: float | None = None, is_downloading: bool = False
    ) -> None:
        """What is being done, how far it is (0 to 1), and whether the file is on its way."""
        ...


class PrepareModel(Protocol):
    """Finds, fetches and verifies a model's file."""

    async def __call__(self, name: str, report: Report) -> PreparedModel:
        """Prepare a model; `report` is told in words how it goes.

        Raises:
            ModelError: it cannot be had.
        """
        ...


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

    @property
    def is_ready(self) -> bool:
        """Whether it can answer."""
        return self.phase is ModelPhase.READY and self.engine is not None

    @property
    def is_remote(self) -> bool:
        """Whether another machine answers for it."""
        return self.settings.remote is not None

    @property
    def refuses_raw_prompts(self) -> bool:
        """Whether only chats are answered, as far as it is known."""
        remote = self.settings.remote
        if remote is None:
            return False
        # A remote engine finds it out by asking.
        takes: bool = getattr(self.engine, "takes_raw_prompts", remote.supports_raw_prompts)
        return not takes

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


def new_hosted(settings: ModelSettings) -> HostedModel:
    """A model as the settings have it, before anything was done for it."""
    return HostedModel(
        settings,
        phase=ModelPhase.LOADING if settings.load_at_start else ModelPhase.UNLOADED,
        is_wanted=settings.load_at_start,
        is_pinned=settings.is_pinned,
    )


EstimateBytes = Callable[[EngineSettings], int | None]
"""Memory that a model will need; None when its file cannot be read. May block."""


def estimate_model_bytes(settings: EngineSettings) -> int | None:
    """By the header of the model's file."""
    from edge_agent.engine.llama.memory_need import estimate_bytes
    from edge_agent.engine.llama.model_files import describe_model_file
    from edge_agent.errors import ModelFileError

    try:
        return estimate_bytes(describe_model_file(settings.model_path), settings)
    except ModelFileError:
        return None  # the engine will say what is wrong with it


def issue_of(error: AgentError) -> str:
    """A failed load as an issue: its name, a colon, and what an operator should know."""
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
