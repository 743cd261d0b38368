"""A model's entry in the settings, with the kinds of engine that it can have.

A new kind of engine has a row in `ENGINES` here, and a field in `ModelSettings` when it needs
settings of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from edge_agent.engine.llama.spec import LlamaSpec
from edge_agent.engine.remote.settings import RemoteSettings
from edge_agent.engine.remote.spec import RemoteSpec
from edge_agent.engine.spec import EngineSpec
from edge_agent.errors import ModelError
from edge_agent.limits import limit_problems
from pointsman.settings_table import REQUIRED


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model to be served.

    Attributes:
        name: Name in the catalogue. Any name for a remote model.
        slots: Number of sequences decoded at once.
        threads: Number of decoding threads. 0: all cores but one.
        context_tokens: Maximum tokens of prompt plus answer of one sequence. 0: the catalogue's.
        gpu_layers: Number of layers offloaded to a GPU.
        cpu_share_ratio: Share of its threads' time that the model may use. The rest is left to
            other programs.
        prompt_usd_per_token: Price of a prompt token, counted by routing.
        completion_usd_per_token: Price of an answer token, counted by routing.
        request_usd: Price of a request, counted by routing.
        load_at_start: Load the model at the start. False: wait for an order (`models load`).
        is_pinned: Never unload the model to make room or for being idle.
        prefix_reuse: Held keys and values a prompt may start from: off, session (the same
            conversation), system (also the whole system prompt of others) or any. A client can
            time its first token and so learn that somebody has sent the same text.
        remote: the server that answers for it; unset loads the model here.
    """

    name: str = field(metadata=REQUIRED)
    slots: int = 4
    threads: int = 0
    context_tokens: int = 0
    gpu_layers: int = 0
    cpu_share_ratio: float = 1.0
    prompt_usd_per_token: float = 0.0
    completion_usd_per_token: float = 0.0
    request_usd: float = 0.0
    load_at_start: bool = True
    is_pinned: bool = False
    prefix_reuse: str = "system"
    remote: RemoteSettings | None = None

    @property
    def has_price(self) -> bool:
        """Whether an answer costs money."""
        return any((self.prompt_usd_per_token, self.completion_usd_per_token, self.request_usd))


SpecOf = Callable[[ModelSettings], EngineSpec | None]
"""The kind of engine that a model's settings name; None when they do not name this one."""

ENGINES: Final[Sequence[SpecOf]] = (
    lambda entry: None if entry.remote is None else RemoteSpec(entry.remote),
    lambda entry: LlamaSpec(),  # for a model that names no other engine
)
"""Every kind of engine; the first that a model's settings name is the model's."""


def spec_of(entry: ModelSettings, engines: Sequence[SpecOf] = ENGINES) -> EngineSpec:
    """The kind of engine that runs a model.

    Args:
        engines: the last of them takes every model.
    """
    return next(spec for find in engines if (spec := find(entry)) is not None)


def run_alike(
    one: ModelSettings, other: ModelSettings, engines: Sequence[SpecOf] = ENGINES
) -> bool:
    """Whether going from one entry to the other changes nothing of how the model is run."""
    spec = spec_of(one, engines)
    return spec == spec_of(other, engines) and spec.runs_alike(one, other)


def check_limits(entry: ModelSettings) -> None:
    """Refuse what an order asks for and no engine can do.

    Raises:
        ModelError: with the limits.
    """
    problems = limit_problems(entry.slots, entry.context_tokens, 0)
    if problems:
        raise ModelError(f"{entry.name}: {'; '.join(problems)}")
