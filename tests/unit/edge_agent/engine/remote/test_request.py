"""What is sent to OpenAI-compatible servers, each with its own ways."""

import json
from typing import Any

import pytest

from edge_agent.engine.base import (
    FormatKind,
    GenerationRequest,
    Message,
    RejectedError,
    RejectionKind,
    ResponseFormat,
    Sampling,
)
from edge_agent.engine.remote.endpoint import ServerKind
from edge_agent.engine.remote.request import RequestWriter
from edge_agent.engine.remote.settings import OpenAiSettings

CHAT = (Message("user", "Hello"),)
SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}}}'
OBJECT = ResponseFormat(FormatKind.JSON_OBJECT)
BY_SCHEMA = ResponseFormat(FormatKind.JSON_SCHEMA, SCHEMA)
GRAMMAR = ResponseFormat(FormatKind.GRAMMAR, 'root ::= "yes" | "no"')
LLAMA, VLLM, OTHER = ServerKind.LLAMA_SERVER, ServerKind.VLLM, ServerKind.OTHER


def writer(server: ServerKind = OTHER, **settings: Any) -> RequestWriter:
    made = RequestWriter(OpenAiSettings("http://server/v1", "small", **settings))
    made.server = server
    return made


def body(made: RequestWriter, request: GenerationRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.body(request, 7))
    return found


def test_chat_and_raw_prompt_carry_every_parameter() -> None:
    sampling = Sampling(9, 0.0, 0.5, 3, 2**64 - 1, ("END",))
    chat = body(writer(), GenerationRequest("r", CHAT, sampling))
    assert chat["messages"] == [{"role": "user", "content": "Hello"}]
    assert (chat["max_tokens"], chat["temperature"], chat["top_p"], chat["top_k"]) == (7, 0, 0.5, 3)
    assert (chat["seed"], chat["stop"], chat["stream"]) == (-1, ["END"], True)
    raw = body(writer(omit_parameters=("top_k",)), GenerationRequest("r", "Hello"))
    assert raw["prompt"] == "Hello"
    assert "top_k" not in raw
    assert "response_format" not in raw


@pytest.mark.parametrize(
    ("server", "prompt", "wanted", "sent"),
    [
        (OTHER, CHAT, OBJECT, {"response_format": {"type": "json_object"}}),
        (VLLM, "Hello", OBJECT, {"response_format": {"type": "json_object"}}),
        (LLAMA, "Hello", OBJECT, {"json_schema": {"type": "object"}}),
        (LLAMA, "Hello", BY_SCHEMA, {"json_schema": json.loads(SCHEMA)}),
        (LLAMA, CHAT, GRAMMAR, {"grammar": GRAMMAR.text}),
        (VLLM, CHAT, GRAMMAR, {"structured_outputs": {"grammar": GRAMMAR.text}}),
    ],
)
def test_format_is_put_as_each_server_knows_it(
    server: ServerKind, prompt: Any, wanted: ResponseFormat, sent: dict[str, Any]
) -> None:
    made = writer(server)
    request = GenerationRequest("r", prompt, response_format=wanted)
    made.check_format(request)
    found = body(made, request)
    names = ("response_format", "json_schema", "grammar", "structured_outputs")
    assert {name: found[name] for name in names if name in found} == sent


def test_schema_goes_to_chats_by_openais_own_name() -> None:
    found = body(writer(), GenerationRequest("r", CHAT, response_format=BY_SCHEMA))
    assert found["response_format"]["type"] == "json_schema"
    assert found["response_format"]["json_schema"]["schema"] == json.loads(SCHEMA)
    assert found["response_format"]["json_schema"]["strict"] is True


@pytest.mark.parametrize(("prompt", "wanted"), [(CHAT, GRAMMAR), ("Hello", BY_SCHEMA)])
def test_format_that_a_server_would_ignore_is_refused(prompt: Any, wanted: ResponseFormat) -> None:
    with pytest.raises(RejectedError) as refused:
        writer().check_format(GenerationRequest("r", prompt, response_format=wanted))
    assert refused.value.kind is RejectionKind.INVALID_REQUEST


def test_parameter_is_left_out_only_when_the_server_can_do_without() -> None:
    made = writer()
    request = GenerationRequest("r", CHAT)
    assert not made.can_do_without("messages", "unsupported_parameter")
    assert not made.can_do_without("top_k", "some_error")
    assert made.can_do_without("top_k", "unsupported_parameter")
    assert not made.can_do_without("top_k", "unsupported_parameter"), "it was not sent"
    assert made.can_do_without("max_tokens", "unsupported_parameter")
    found = body(made, request)
    assert "top_k" not in found
    assert found["max_completion_tokens"] == 7
