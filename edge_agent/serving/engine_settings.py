"""How a model of the settings is run, here or by a remote server."""

from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineSettings, PrefixReuse
from edge_agent.engine.openai import OpenAiSettings, Rates
from edge_agent.identity import usable_cores
from edge_agent.serving.hosted import PreparedModel

_DEFAULT_CONTEXT_TOKENS = 4096


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
