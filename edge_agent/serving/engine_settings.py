"""How a model of the settings is run, here or by a remote server."""

from dataclasses import replace
from typing import Final

from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineSettings, PrefixReuse
from edge_agent.engine.remote.engine import OpenAiSettings, Rates
from edge_agent.errors import ModelError
from edge_agent.identity import usable_cores
from edge_agent.limits import limit_problems
from edge_agent.serving.hosted import PreparedModel

_DEFAULT_CONTEXT_TOKENS: Final = 4096

_IMMEDIATE: Final = frozenset(
    {
        "load_at_start",
        "is_pinned",
        "prompt_usd_per_token",
        "completion_usd_per_token",
        "request_usd",
    }
)
"""Settings of a local model that change nothing of how it is run."""


def local_engine_settings(model: ModelSettings, prepared: PreparedModel) -> EngineSettings:
    """How a model is run in a child process of this node.

    Args:
        prepared: with a path.
    """
    assert prepared.path is not None  # only a remote model has none
    return EngineSettings(
        model_path=prepared.path,
        context_tokens=model.context_tokens
        or min(prepared.context_tokens, _DEFAULT_CONTEXT_TOKENS),
        slots=model.slots,
        threads=model.threads or default_threads(),
        gpu_layers=model.gpu_layers,
        cpu_share_ratio=model.cpu_share_ratio,
        chat_template=prepared.chat_template,
        prefix_reuse=PrefixReuse(model.prefix_reuse),
    )


def remote_engine_settings(model: ModelSettings) -> OpenAiSettings:
    """How a remote model is asked. One that costs money is not measured beyond one small request.

    Args:
        model: with `remote`.
    """
    remote = model.remote
    assert remote is not None
    return OpenAiSettings(
        base_url=remote.base_url,
        model=remote.model,
        slots=model.slots,
        context_tokens=remote.context_tokens or model.context_tokens,
        api_key_file=remote.api_key_file,
        api_key_env=remote.api_key_env,
        has_chat_template=not remote.is_base_model,
        supports_raw_prompts=remote.supports_raw_prompts,
        supports_response_format=remote.supports_response_format,
        omit_parameters=remote.omit_parameters,
        first_token_seconds=remote.first_token_seconds,
        is_measured=remote.calibrate and not model.has_price,
        declared=Rates(
            remote.prefill_tokens_per_second,
            remote.decode_tokens_per_second,
            remote.saturated_decode_tokens_per_second,
        ),
    )


def default_threads() -> int:
    """All cores but one, which stays with the agent (case P3)."""
    return max(1, usable_cores() - 1)


def check_limits(model: ModelSettings) -> None:
    """Refuse what an order asks for and no engine can do.

    Raises:
        ModelError: with the limits.
    """
    problems = limit_problems(model.slots, model.context_tokens, 0)
    if problems:
        raise ModelError(f"{model.name}: {'; '.join(problems)}")


def runs_alike(one: ModelSettings, other: ModelSettings) -> bool:
    """Whether going from one to the other changes nothing of how the model is run."""
    if one.remote is not None or other.remote is not None:
        return one == other  # whether it may be measured goes by its price
    return replace(one, **{name: getattr(other, name) for name in _IMMEDIATE}) == other
