"""What a model needs that llama.cpp runs on this node, and how it is run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from edge_agent.engine.base import EngineSettings, InferenceEngine, PrefixReuse
from edge_agent.engine.spec import (
    EngineSpec,
    FetchModel,
    ModelEntry,
    PreparedModel,
    Report,
    Shelf,
)
from edge_agent.errors import ModelFileError
from edge_agent.findings import Finding
from edge_agent.identity import usable_cores

_DEFAULT_CONTEXT_TOKENS: Final = 4096


def make_supervised(settings: EngineSettings) -> InferenceEngine:
    """A child process for one model."""
    from edge_agent.engine.llama.supervisor import SupervisedEngine

    return SupervisedEngine(settings)


def estimate_by_header(settings: EngineSettings) -> int | None:
    """Memory that a model will need, by the header of its file; None when it cannot be read."""
    from edge_agent.engine.llama.memory_need import estimate_bytes
    from edge_agent.engine.llama.model_files import describe_model_file

    try:
        return estimate_bytes(describe_model_file(settings.model_path), settings)
    except ModelFileError:
        return None  # the engine will say what is wrong with it


@dataclass(frozen=True, slots=True)
class LlamaSpec(EngineSpec):
    """Runs a model of the catalogue in a child process of this node.

    Attributes:
        make_engine: settings -> an engine that is not loaded yet.
        estimate: memory that a model will need; None when nobody knows. May block.
    """

    name: ClassVar[str] = "llama"
    make_engine: Callable[[EngineSettings], InferenceEngine] = make_supervised
    estimate: Callable[[EngineSettings], int | None] = estimate_by_header

    async def prepare(self, entry: ModelEntry, fetch: FetchModel, report: Report) -> PreparedModel:
        """See `EngineSpec.prepare`."""
        report("preparing the model file")
        return await fetch(entry.name, report)

    def make(self, entry: ModelEntry, prepared: PreparedModel) -> InferenceEngine:
        """See `EngineSpec.make`."""
        return self.make_engine(engine_settings(entry, prepared))

    def needed_bytes(self, entry: ModelEntry, prepared: PreparedModel) -> int | None:
        """See `EngineSpec.needed_bytes`."""
        return self.estimate(engine_settings(entry, prepared))

    def conditions(self, entry: ModelEntry, prepared: PreparedModel) -> list[str]:
        """See `EngineSpec.conditions`."""
        settings = engine_settings(entry, prepared)
        return [
            f"threads={settings.threads}",
            f"gpu={settings.gpu_layers}",
            f"share={settings.cpu_share_ratio:g}",
            f"context={settings.context_tokens}",
        ]

    def runs_alike(self, one: ModelEntry, other: ModelEntry) -> bool:
        """See `EngineSpec.runs_alike`."""
        return _run(one) == _run(other)

    async def examine(self, entry: ModelEntry, shelf: Shelf) -> list[Finding]:
        """See `EngineSpec.examine`."""
        return shelf.examine(entry.name)


def engine_settings(entry: ModelEntry, prepared: PreparedModel) -> EngineSettings:
    """How a model is run in a child process of this node.

    Args:
        prepared: with a path.
    """
    assert prepared.path is not None  # whoever prepares for llama.cpp finds a file
    return EngineSettings(
        model_path=prepared.path,
        context_tokens=entry.context_tokens
        or min(prepared.context_tokens, _DEFAULT_CONTEXT_TOKENS),
        slots=entry.slots,
        threads=entry.threads or default_threads(),
        gpu_layers=entry.gpu_layers,
        cpu_share_ratio=entry.cpu_share_ratio,
        chat_template=prepared.chat_template,
        prefix_reuse=PrefixReuse(entry.prefix_reuse),
    )


def default_threads() -> int:
    """All cores but one, which stays with the agent."""
    return max(1, usable_cores() - 1)


def _run(entry: ModelEntry) -> tuple[object, ...]:
    """All settings of a model that say how it is run; its price and its pin do not."""
    return (
        entry.name,
        entry.slots,
        entry.threads,
        entry.context_tokens,
        entry.gpu_layers,
        entry.cpu_share_ratio,
        entry.prefix_reuse,
    )
