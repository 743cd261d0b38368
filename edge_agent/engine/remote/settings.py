"""Where an OpenAI-compatible endpoint is, and what is known of it beforehand."""

from dataclasses import dataclass
from typing import Final

DEFAULT_CONTEXT_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast an endpoint is, tokens per second; None is not known.

    Attributes:
        prefill: prompt tokens read.
        decode: of one answer alone.
        saturated_decode: of all slots together.
    """

    prefill: float | None = None
    decode: float | None = None
    saturated_decode: float | None = None


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
    declared: Rates = Rates()

    @property
    def key_source(self) -> str:
        """Where the API key comes from, for people; empty for none."""
        return self.api_key_file or self.api_key_env
