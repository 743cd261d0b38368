"""How a request is put to an OpenAI-compatible server, and what was learned of its ways."""

import json
import math
from typing import Any, Final

from edge_agent.engine.base import (
    FormatKind,
    GenerationRequest,
    RejectedError,
    RejectionKind,
    ResponseFormat,
)
from edge_agent.engine.remote.endpoint import ServerKind
from edge_agent.engine.remote.settings import OpenAiSettings

Json = dict[str, Any]

_DEFAULT_CHARACTERS_PER_TOKEN: Final = 4.0
_TOKENS_PER_MESSAGE: Final = 5
_UNSUPPORTED_CODES: Final = frozenset(
    {"unsupported_parameter", "unknown_parameter", "unrecognized_parameter", "unsupported_value"}
)
_OPTIONAL_PARAMETERS: Final = frozenset(
    {"temperature", "top_p", "top_k", "seed", "stop", "stream_options"}
)


class RequestWriter:
    """Writes requests for one endpoint.

    Args:
        settings: where it is.

    Attributes:
        model: its name there.
        server: whose ways it has.
        context_tokens: longest prompt plus answer; None until known.
        characters_per_token: None until known.
    """

    def __init__(self, settings: OpenAiSettings) -> None:
        self.model = settings.model
        self.server = ServerKind.OTHER
        self.context_tokens: int | None = None
        self.characters_per_token: float | None = None
        self._omitted = set(settings.omit_parameters)
        self._token_limit_name = "max_tokens"

    def body(self, request: GenerationRequest, max_tokens: int) -> bytes:
        """The JSON of a request for a stream."""
        prompt, sampling = request.prompt, request.sampling
        body: Json = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            self._token_limit_name: max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        if isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": m.role, "content": m.content} for m in prompt]
        if sampling.seed is not None:
            # OpenAI's seeds are signed; these are the same 64 bits.
            seed = sampling.seed
            body["seed"] = seed - 2**64 if seed >= 2**63 else seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if request.response_format is not None:
            body |= self._format(request.response_format, isinstance(prompt, str))
        for name in self._omitted:
            body.pop(name, None)
        return json.dumps(body, ensure_ascii=False).encode("utf-8")

    def check_format(self, request: GenerationRequest) -> None:
        """Refuse a format that this server is not known to keep, rather than have it ignored.

        Raises:
            RejectedError: INVALID_REQUEST.
        """
        wanted = request.response_format
        if wanted is None or self.server is not ServerKind.OTHER:
            return
        if wanted.kind is FormatKind.GRAMMAR:
            raise RejectedError(
                RejectionKind.INVALID_REQUEST,
                "This endpoint takes no grammars, only llama-server and vLLM do; ask for a JSON"
                " Schema.",
            )
        if isinstance(request.prompt, str):
            raise RejectedError(
                RejectionKind.INVALID_REQUEST,
                "This endpoint keeps a response format in chats only; send messages.",
            )

    def _format(self, wanted: ResponseFormat, is_raw: bool) -> Json:
        if wanted.kind is FormatKind.GRAMMAR:
            if self.server is ServerKind.VLLM:
                return {"structured_outputs": {"grammar": wanted.text}}
            return {"grammar": wanted.text}
        schema = json.loads(wanted.text) if wanted.kind is FormatKind.JSON_SCHEMA else None
        if is_raw and self.server is ServerKind.LLAMA_SERVER:
            # Its /completions knows no response_format and would ignore one.
            return {"json_schema": {"type": "object"} if schema is None else schema}
        if schema is None:
            return {"response_format": {"type": "json_object"}}
        named = {"name": "answer", "strict": True, "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    def estimated_prompt_tokens(self, request: GenerationRequest, caution: float = 1.0) -> int:
        """A prompt's tokens by its characters; with more caution rather more."""
        per_token = (self.characters_per_token or _DEFAULT_CHARACTERS_PER_TOKEN) / caution
        if isinstance(request.prompt, str):
            return max(1, math.ceil(len(request.prompt) / per_token))
        characters = sum(len(message.content) for message in request.prompt)
        extra = _TOKENS_PER_MESSAGE * len(request.prompt)
        return max(1, math.ceil(characters / per_token + extra * caution))

    def fits(self, request: GenerationRequest, max_tokens: int) -> bool:
        """Whether a prompt and its longest answer fit the context, by a careful estimate."""
        if self.context_tokens is None:
            return True
        return self.estimated_prompt_tokens(request, 1.25) + max_tokens <= self.context_tokens

    def shorter_limit(self, request: GenerationRequest, max_tokens: int) -> int | None:
        """An answer length that leaves room for the prompt; None when there is none to try.

        vLLM and some clouds refuse a request whose prompt fits but whose longest possible answer
        does not; our contract says that such an answer ends at the end of the context.
        """
        if self.context_tokens is None:
            return None
        room = self.context_tokens - self.estimated_prompt_tokens(request, 1.25)
        return room if 0 < room < max_tokens else None

    def can_do_without(self, parameter: object, code: object) -> bool:
        """Leave a parameter out from now on, if the server says that it does not know it."""
        if code not in _UNSUPPORTED_CODES or not isinstance(parameter, str):
            return False
        if parameter == "max_tokens" and self._token_limit_name == parameter:
            self._token_limit_name = "max_completion_tokens"
            return True
        if parameter not in _OPTIONAL_PARAMETERS - self._omitted:
            return False
        self._omitted.add(parameter)
        return True
