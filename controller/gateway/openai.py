"""OpenAI's chat-completions schema: from its JSON to the domain, and from events to its JSON."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.functional_validators import field_validator, model_validator
from pydantic_core import PydanticCustomError

from controller.api.service import ServedModel
from controller.domain.completion import FinishReason, Usage
from controller.domain.request import (
    ChatMessage,
    Constraints,
    FormatKind,
    InferenceRequest,
    ResponseFormat,
    Sampling,
)
from controller.domain.request_record import Account
from controller.errors import RouterError, UnknownModelError, public_error
from controller.ids import ModelName, RequestId, new_request_id
from controller.request_manager.stream import RoutedTo, Text

AUTO_MODEL: Final = "auto"
"""The model name that lets the router choose."""

Json = dict[str, Any]

_FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}

# Parameters that would change the answer and that we do not support, with the values that ask for
# nothing. Anything else that we do not know is ignored, as OpenAI-compatible servers do.
_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    # Of other compatible servers.
    "min_p": (0,),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "grammar": ("",),
    "json_schema": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
_UNSUPPORTED_IN_MESSAGE: Final[Mapping[str, tuple[object, ...]]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
}


class HttpFailure(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of the HTTP response; unused once a stream has begun.
        code: what programs compare, such as "model_not_found".
        message: the sentence that people read.
        param: the request's field that is wrong; None when it is not one field.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    def body(self) -> Json:
        """The error object, in OpenAI's shape."""
        if self.status == 429:
            kind = "rate_limit_error"
        else:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def failure_of(error: Exception) -> HttpFailure:
    """How an error leaves by this door; one that nobody foresaw as a fault of ours, untold."""
    if isinstance(error, HttpFailure):
        return error
    if not isinstance(error, RouterError):
        return internal_failure()
    public = public_error(error)
    param = "model" if isinstance(error, UnknownModelError) else None
    return HttpFailure(public.http_status, public.code, str(error), param)


def internal_failure() -> HttpFailure:
    """What a client is told when the controller itself is at fault; the log has the cause."""
    return HttpFailure(500, "internal_error", "The controller failed; its log says why.")


class _Strict(BaseModel):
    """No "1" for 1, no NaN; what is not listed is ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class ChatTurn(_Strict):
    """One message; a list of text parts has become one text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: object) -> object:
        if not isinstance(content, list):
            return content
        texts = []
        for index, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise PydanticCustomError(
                    "part",
                    "part {index} is not a text part; only text is supported",
                    {"index": index},
                )
            if not isinstance(part.get("text"), str):
                raise PydanticCustomError("part", "part {index} has no text", {"index": index})
            texts.append(part["text"])
        return "".join(texts)


class StreamOptions(_Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class JsonSchemaFormat(_Strict):
    """OpenAI's wrapper of a schema; its name and strictness say nothing more: it is always kept."""

    schema_: Annotated[Json, Field(alias="schema")]


class ResponseFormatOption(_Strict):
    """What the answer must look like: free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormatOption":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "schema", "json_schema belongs to type json_schema, and to no other"
            )
        return self

    def to_format(self) -> ResponseFormat | None:
        """The format in the domain's terms; None for free text."""
        if self.json_schema is not None:
            schema = json.dumps(self.json_schema.schema_, ensure_ascii=False)
            return ResponseFormat(FormatKind.JSON_SCHEMA, schema)
        return ResponseFormat(FormatKind.JSON_OBJECT) if self.type == "json_object" else None


class RoutingOptions(_Strict):
    """Our own request field `pointsman`: limits that routing must keep, and the conversation.

    `session_id` is the same for all turns of a conversation, so that the node that still holds the
    last one can be preferred. OpenAI's `user` names a person, who may have many, and is not used.

    A misspelt limit is refused, for one that is silently dropped would not hold.
    """

    model_config = ConfigDict(extra="forbid")

    request_id: Annotated[str, StringConstraints(pattern=r"^[!-~]{1,128}$")] | None = None
    min_quality_ratio: float | None = None
    deadline_seconds: float | None = None
    max_price_usd: float | None = None
    edge_only: bool = False
    session_id: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    grammar: Annotated[str, StringConstraints(min_length=1)] | None = None


class ChatCompletionRequest(_Strict):
    """What `POST /v1/chat/completions` takes; absent and null mean the default.

    `top_k` is not OpenAI's, but common. Ranges are the service's to check.
    """

    messages: Annotated[list[ChatTurn], Field(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, Field(le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(le=2**31 - 1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormatOption | None = None
    pointsman: RoutingOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, stop: object) -> object:
        return [stop] if isinstance(stop, str) else stop

    @property
    def is_stream(self) -> bool:
        """Whether the answer is to come piece by piece."""
        return self.stream is True

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def to_inference(self) -> InferenceRequest:
        """The request in the domain's terms, with a new id when the client gave none."""
        given, defaults = self.pointsman or RoutingOptions(), Sampling()
        tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return InferenceRequest(
            request_id=RequestId(given.request_id) if given.request_id else new_request_id(),
            prompt=tuple(
                ChatMessage("system" if turn.role == "developer" else turn.role, turn.content)
                for turn in self.messages
            ),
            model=None if self.model in (None, "", AUTO_MODEL) else ModelName(self.model),
            sampling=Sampling(
                max_tokens=defaults.max_tokens if tokens is None else tokens,
                temperature=defaults.temperature if self.temperature is None else self.temperature,
                top_p=defaults.top_p if self.top_p is None else self.top_p,
                top_k=defaults.top_k if self.top_k is None else self.top_k,
                # OpenAI's seeds are signed; ours are the same 64 bits without a sign.
                seed=None if self.seed is None else self.seed % 2**64,
                stop=tuple(self.stop or ()),
            ),
            constraints=Constraints(
                min_quality_ratio=given.min_quality_ratio,
                deadline_seconds=given.deadline_seconds,
                max_price_usd=given.max_price_usd,
                edge_only=given.edge_only,
            ),
            response_format=self._format(given),
            session_id=given.session_id or "",
        )

    def _format(self, given: RoutingOptions) -> ResponseFormat | None:
        if given.grammar is not None:
            return ResponseFormat(FormatKind.GRAMMAR, given.grammar)
        return self.response_format.to_format() if self.response_format is not None else None


def parse_request(body: bytes) -> ChatCompletionRequest:
    """The request that a body holds.

    Raises:
        HttpFailure: status 400; names the field and says what is wrong with it.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(
            f"The body is not valid UTF-8: byte {error.start} is wrong; send JSON in UTF-8.",
            code="invalid_utf8",
        ) from error
    try:
        data = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise _bad(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(data, dict):
        raise _bad("The body must be a JSON object.", code="invalid_json")
    _refuse_unsupported(data)
    try:
        request = ChatCompletionRequest.model_validate(data)
    except ValidationError as error:
        raise _first_problem(error) from error
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise _bad("max_tokens and max_completion_tokens: give one of them.", "max_tokens")
    options = request.pointsman
    if options is not None and options.grammar is not None and request.response_format is not None:
        raise _bad("pointsman.grammar: not together with response_format.", "pointsman.grammar")
    if request.stream_options is not None and not request.is_stream:
        raise _bad("stream_options: only together with stream set to true.", "stream_options")
    return request


# Where pydantic's own words speak of Python.
_PROBLEMS: Final[Mapping[str, str]] = {
    "extra_forbidden": f"no such option; there are: {', '.join(RoutingOptions.model_fields)}",
    "model_type": "must be an object",
    "string_pattern_mismatch": "1 to 128 visible ASCII characters, no spaces",
    "too_short": "at least one is needed",
}


def _refuse_unsupported(data: Json) -> None:
    _refuse(data, _UNSUPPORTED, "")
    messages = data.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _refuse(message, _UNSUPPORTED_IN_MESSAGE, f"messages[{index}].")


def _refuse(data: Json, unsupported: Mapping[str, tuple[object, ...]], prefix: str) -> None:
    for name, neutral in unsupported.items():
        value = data.get(name)
        if value is not None and value not in neutral:
            raise _bad(
                f"{prefix}{name}: not supported by this server; leave it out.",
                prefix + name,
                "unsupported_parameter",
            )


def _first_problem(error: ValidationError) -> HttpFailure:
    problem = error.errors(include_url=False, include_input=False)[0]
    param = ""
    for step in problem["loc"]:
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else step
    message = _PROBLEMS.get(problem["type"], problem["msg"])
    return _bad(f"{param}: {message[:1].lower()}{message[1:]}.", param)


def _bad(message: str, param: str | None = None, code: str = "invalid_request") -> HttpFailure:
    return HttpFailure(400, code, message, param)


# -- answers --------------------------------------------------------------------------------------


def to_json(value: object) -> bytes:
    """UTF-8 JSON; what is not a finite number becomes null."""
    return pydantic_core.to_json(value, inf_nan_mode="null")


def account_failure(account: Account) -> HttpFailure | None:
    """Why an account is no answer; None when it is one.

    OpenAI has no finish reason for an answer that was cut off, and "stop" would be a lie.
    """
    if account.completion.reason in _FINISH_REASONS:
        return None
    message = account.completion.message or f"it was {account.completion.reason.value}"
    return HttpFailure(502, "generation_failed", f"The answer is not complete: {message}.")


def chat_completion(account: Account, text: str, created: int) -> Json:
    """A `chat.completion` object.

    Args:
        account: of an answer that is complete; see `account_failure`.
        created: Unix seconds.
    """
    return {
        "id": account.request_id,
        "object": "chat.completion",
        "created": created,
        "model": account.model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": _FINISH_REASONS[account.completion.reason],
            }
        ],
        "usage": _usage(account.completion.usage),
        "pointsman": _story(account),
    }


class ChunkBuilder:
    """Makes the `chat.completion.chunk` objects of one answer.

    The first chunk with a choice carries the role; the one with the finish reason carries our
    account of the request; the usage chunk, when it is asked for, comes last and has no choice.

    Args:
        model: the name in chunks until it is known where the request went.
        created: Unix seconds.
    """

    def __init__(
        self, request_id: RequestId, model: str, created: int, includes_usage: bool
    ) -> None:
        self._request_id = request_id
        self._model = model
        self._created = created
        self._includes_usage = includes_usage
        self._has_role = False

    def routed(self, event: RoutedTo) -> list[Json]:
        """The request went to a node, for the first time or again."""
        self._model = event.model
        chunk = self._chunk({})
        chunk["pointsman"] = {
            "request_id": self._request_id,
            "node_id": event.node_id,
            "model": event.model,
            "policy": event.policy,
            "batch_id": event.batch_id,
        }
        return [chunk]

    def text(self, event: Text) -> list[Json]:
        """Text came; nothing when the engine still holds it back."""
        return [self._chunk({"content": event.text})] if event.text else []

    def finished(self, account: Account) -> list[Json]:
        """The answer is complete; see `account_failure`."""
        self._model = account.model
        last = self._chunk({}, _FINISH_REASONS[account.completion.reason])
        last["pointsman"] = _story(account)
        if not self._includes_usage:
            return [last]
        usage = self._chunk({})
        usage["choices"] = []
        usage["usage"] = _usage(account.completion.usage)
        return [last, usage]

    def _chunk(self, delta: Json, finish_reason: str | None = None) -> Json:
        if not self._has_role:
            delta = {"role": "assistant", "content": "", **delta}
            self._has_role = True
        chunk: Json = {
            "id": self._request_id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": [
                {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            ],
        }
        if self._includes_usage:
            chunk["usage"] = None
        return chunk


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _story(account: Account) -> Json:
    usage = account.completion.usage
    return {
        "request_id": account.request_id,
        "node_id": account.node_id,
        "model": account.model,
        "policy": account.policy,
        "batch_id": account.batch_id,
        "attempts": account.attempts,
        "window_seconds": account.window_seconds,
        "queue_seconds": usage.queue_seconds,
        "prefill_seconds": usage.prefill_seconds,
        "decode_seconds": usage.decode_seconds,
        "first_token_seconds": account.first_token_seconds,
        "total_seconds": account.total_seconds,
        "predicted_finish_seconds": account.predicted_finish_seconds,
        "measured_finish_seconds": account.measured_finish_seconds,
        "energy_joules": usage.energy_joules,
        "energy_source": usage.energy_source,
        "cost_usd": account.cost_usd,
    }


def model_list(models: list[ServedModel], created: int) -> list[Json]:
    """The `model` objects: what the fleet can answer with now, then "auto" when that is anything.

    Args:
        created: Unix seconds; OpenAI's schema wants a time, and the fleet keeps none.
    """
    found = [
        _model(
            served.name,
            created,
            {
                "family": served.family,
                "parameters_billions": served.parameters_billions,
                "quantisation": served.quantisation,
                "context_tokens": served.context_tokens,
                "node_ids": list(served.node_ids),
            },
        )
        for served in models
    ]
    if found:
        found.append(_model(AUTO_MODEL, created, {"description": "The router chooses the model."}))
    return found


def _model(name: str, created: int, about: Json) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pointsman",
        "pointsman": about,
    }
