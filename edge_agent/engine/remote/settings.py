"""Where an OpenAI-compatible endpoint is, as the settings and as the engine have it."""

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from edge_agent.engine.base import Rates
from pointsman.settings_table import REQUIRED

DEFAULT_CONTEXT_TOKENS: Final = 4096

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """An OpenAI-compatible server answers for the model, which needs no file on this node.

    See [remote engines](remote-engines.md).

    Attributes:
        base_url: Address of the server, up to and including /v1, such as
            "http://gpu-server:8080/v1". Required.
        model: Model name on the server. Empty: its only model.
        api_key_file: File with the API key. Read for each request.
        api_key_env: Environment variable with the API key, if there is no file.
        context_tokens: Maximum tokens of prompt plus answer. 0: as the server says, or 4096.
        family: Model family known to routing. Empty: the model's name.
        parameters_billions: Model size, from which routing derives the expected quality. Above 0;
            required.
        quantisation: Quantisation, from which routing derives the expected quality.
        is_base_model: Not tuned to follow instructions: chats are refused.
        supports_raw_prompts: The server has /v1/completions. False: raw prompts are refused.
        supports_response_format: The server respects response_format. False: requests with a
            format are refused.
        omit_parameters: Request parameters that the server refuses, such as ["top_k"].
        first_token_seconds: Maximum time to the first token.
        calibrate: Measure the speed with requests. Models with a price are never measured.
        prefill_tokens_per_second: Prompt tokens read per second. Unset: measured.
        decode_tokens_per_second: Tokens per second of one answer alone. Unset: measured.
        saturated_decode_tokens_per_second: Tokens per second of all slots together. Unset:
            measured.
    """

    base_url: str = field(default="", metadata=REQUIRED)
    model: str = ""
    api_key_file: str = ""
    api_key_env: str = ""
    context_tokens: int = 0
    family: str = ""
    parameters_billions: float = field(default=0.0, metadata=REQUIRED)
    quantisation: str = "F16"
    is_base_model: bool = False
    supports_raw_prompts: bool = True
    supports_response_format: bool = True
    omit_parameters: tuple[str, ...] = ()
    first_token_seconds: float = 300.0
    calibrate: bool = True
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    saturated_decode_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class OpenAiSettings:
    """Where an endpoint is and how it is used.

    Attributes:
        base_url: up to and with /v1.
        model: its name there; empty takes the only one there is.
        slots: answers asked for at once, at least 1.
        context_tokens: 0 takes what the server says, else DEFAULT_CONTEXT_TOKENS.
        api_key_file: read again for each request; goes before `api_key_env`.
        has_chat_template: False refuses chats.
        supports_raw_prompts: False refuses raw prompts.
        supports_response_format: False refuses requests whose answer must keep a format.
        omit_parameters: request parameters that are never sent.
        first_token_seconds: from asking to the first token.
        is_measured: False when no requests may be sent only to measure its speed.
        declared: rates that are known beforehand.
    """

    base_url: str
    model: str = ""
    slots: int = 4
    context_tokens: int = 0
    api_key_file: str = ""
    api_key_env: str = ""
    has_chat_template: bool = True
    supports_raw_prompts: bool = True
    supports_response_format: bool = True
    omit_parameters: tuple[str, ...] = ()
    first_token_seconds: float = 300.0
    is_measured: bool = True
    declared: Rates = field(default_factory=Rates)

    @property
    def key_source(self) -> str:
        """Where the API key comes from, for people; empty for none."""
        return self.api_key_file or self.api_key_env


def section_problems(remote: RemoteSettings) -> list[str]:
    """What is wrong with a `[models.remote]` section, one line each."""
    problems = []
    url = urlsplit(remote.base_url)
    try:
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number
        is_address = False
    if url.username is not None or url.password is not None:
        # Not shown: it is a secret.
        problems.append("base_url: no user or password in it; use api_key_file")
    elif remote.base_url and (not is_address or url.query or url.fragment):
        problems.append(
            f'base_url: an address such as "http://gpu-server:8080/v1", not {remote.base_url!r}'
        )
    if remote.api_key_file and remote.api_key_env:
        problems.append("api_key_file and api_key_env: one of them")
    if remote.api_key_env and not _VARIABLE.fullmatch(remote.api_key_env):
        # Not shown: what stands there in error may be the key itself.
        problems.append("api_key_env: the name of an environment variable, not the key")
    if remote.context_tokens < 0:
        problems.append("context_tokens: 0 or more")
    if not 0 <= remote.parameters_billions < 1e6:
        problems.append("parameters_billions: above 0; guess it where the vendor does not say")
    if not remote.first_token_seconds > 0:
        problems.append("first_token_seconds: above 0")
    for name in (
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "saturated_decode_tokens_per_second",
    ):
        rate = getattr(remote, name)
        if rate is not None and not 0 < rate < 1e9:
            problems.append(f"{name}: above 0, not {rate}")
    return problems
