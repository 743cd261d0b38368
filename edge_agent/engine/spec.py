"""The contract of a kind of engine: what its models need before they run, and how they are run.

`base.py` has the contract of an engine that runs. Nothing outside an engine's own folder asks which
kind it is; `registry.py` lists the kinds.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from edge_agent.engine.base import InferenceEngine
from edge_agent.findings import Finding


class ModelEntry(Protocol):
    """What every kind of engine is told of a model; `ModelSettings` describes the fields."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def slots(self) -> int:
        """Sequences decoded at once."""

    @property
    def threads(self) -> int:
        """0 leaves one core to the agent."""

    @property
    def context_tokens(self) -> int:
        """Of one sequence; 0 is for the engine to say."""

    @property
    def gpu_layers(self) -> int:
        """Layers offloaded to a GPU."""

    @property
    def cpu_share_ratio(self) -> float:
        """Of its threads' time, above 0, at most 1."""

    @property
    def prefix_reuse(self) -> str:
        """A value of `PrefixReuse`."""

    @property
    def has_price(self) -> bool:
        """Whether an answer costs money."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """What is known of a model before it is loaded.

    Attributes:
        path: of its verified file; None when this node has no file of it.
        digest: of the file, or of where the model is.
        context_tokens: 0 when nobody has said it.
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


FetchModel = Callable[[str, Report], Awaitable[PreparedModel]]
"""Finds, fetches and verifies the file of a model by its name in the catalogue.

`Report` is told in words how it goes. Raises ModelError when it cannot be had.
"""


class Shelf(Protocol):
    """The model files of this machine, for whoever examines it. May block."""

    def find(self, name: str) -> PreparedModel | None:
        """The model's file as it is here; None when it is not, or is in no catalogue."""

    def examine(self, name: str) -> list[Finding]:
        """Whether the model's file is here, or can be fetched."""


class EngineSpec(Protocol):
    """One kind of engine, for one model. An engine overrides what differs from these defaults.

    Attributes:
        name: of the kind, and of its section beside a model's entry in the settings.
        uses_this_machine: its model takes this node's memory, and its answers this node's energy.
        loading_text: what is being done while its engine is loading.
        takes_raw_prompts: False when the settings say that only chats are answered.
    """

    name: ClassVar[str]
    uses_this_machine: ClassVar[bool] = True
    loading_text: ClassVar[str] = "loading"

    @property
    def takes_raw_prompts(self) -> bool:
        """Whether raw prompts are answered, as far as the settings say."""
        return True

    def problems(self) -> list[str]:
        """What is wrong with the kind's own settings, one line each, with the section's name."""
        return []

    async def prepare(self, entry: ModelEntry, fetch: FetchModel, report: Report) -> PreparedModel:
        """Have ready what the engine needs.

        Raises:
            ModelError: it cannot be had.
        """
        ...

    def make(self, entry: ModelEntry, prepared: PreparedModel) -> InferenceEngine:
        """An engine for the model, not loaded yet."""
        ...

    def needed_bytes(self, entry: ModelEntry, prepared: PreparedModel) -> int | None:
        """Memory of this node that the model will need; None when nobody knows. May block."""
        return 0

    def conditions(self, entry: ModelEntry, prepared: PreparedModel) -> list[str]:
        """What a measured speed depends on beside the file, the engine's version and the slots."""
        return []

    def runs_alike(self, one: ModelEntry, other: ModelEntry) -> bool:
        """Whether going from one entry to the other changes nothing of how the model is run.

        Both entries are of this kind, with equal sections.
        """
        return one == other

    async def examine(self, entry: ModelEntry, shelf: Shelf) -> list[Finding]:
        """What stands in the way of running the model, for `edge-agent doctor`.

        Raises:
            AgentError: it cannot be examined.
        """
        return []
