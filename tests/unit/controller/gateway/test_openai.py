"""Conversions between OpenAI's schema and the domain."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from controller.api.service import ServedModel
from controller.domain.completion import Completion, FinishReason, Usage
from controller.domain.request import (
    ChatMessage,
    Constraints,
    FormatKind,
    ResponseFormat,
    Sampling,
)
from controller.domain.request_record import Account
from controller.errors import PUBLIC_ERRORS, InvalidRequestError, UnknownModelError
from controller.gateway.openai import (
    ChatCompletionRequest,
    ChunkBuilder,
    HttpFailure,
    RoutingOptions,
    account_failure,
    chat_completion,
    failure_of,
    model_list,
    parse_request,
    to_json,
)
from controller.ids import BatchId, ModelName, NodeId, RequestId
from controller.request_manager.stream import RoutedTo, Text

HELLO = [{"role": "user", "content": "Hello"}]

ACCOUNT = Account(
    request_id=RequestId("req-1"),
    batch_id=BatchId("batch-7"),
    node_id=NodeId("pi"),
    model=ModelName("smol"),
    policy="memetic",
    completion=Completion(
        FinishReason.STOP,
        Usage(
            prompt_tokens=12,
            completion_tokens=3,
            queue_seconds=0.01,
            prefill_seconds=0.2,
            decode_seconds=0.3,
            energy_joules=2.5,
            energy_source="estimate",
        ),
    ),
    window_seconds=0.1,
    first_token_seconds=0.4,
    total_seconds=0.7,
    predicted_finish_seconds=0.5,
    measured_finish_seconds=0.6,
    cost_usd=0.0,
    attempts=1,
)
ROUTED = RoutedTo(NodeId("pi"), ModelName("smol"), BatchId("batch-7"), "memetic")


def body(**fields: object) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def refusal(data: bytes) -> HttpFailure:
    with pytest.raises(HttpFailure) as caught:
        parse_request(data)
    assert caught.value.status == 400
    return caught.value


def ended(reason: FinishReason, message: str = "") -> Account:
    return replace(ACCOUNT, completion=Completion(reason, Usage(), message=message))


# -- requests -------------------------------------------------------------------------------------


def test_bare_request_takes_the_domain_defaults_and_a_new_id() -> None:
    first, second = (parse_request(body()).to_inference() for _ in range(2))
    assert first.prompt == (ChatMessage("user", "Hello"),)
    assert first.model is None
    assert first.sampling == Sampling()
    assert first.constraints == Constraints()
    assert first.request_id.startswith("req-")
    assert first.request_id != second.request_id


def test_every_supported_parameter_reaches_the_domain() -> None:
    request = parse_request(
        body(
            model="smol",
            max_completion_tokens=9,
            temperature=0,
            top_p=0.5,
            top_k=3,
            seed=42,
            stop=["\n", "END"],
            stream=True,
            stream_options={"include_usage": True},
            pointsman={
                "request_id": "mine-1",
                "min_quality_ratio": 0.5,
                "deadline_seconds": 20,
                "max_price_usd": 0.01,
                "edge_only": True,
            },
        )
    )
    assert request.is_stream
    assert request.includes_usage
    inference = request.to_inference()
    assert inference.request_id == "mine-1"
    assert inference.model == "smol"
    assert inference.sampling == Sampling(9, 0, 0.5, 3, 42, ("\n", "END"))
    assert inference.constraints == Constraints(0.5, 20, 0.01, True)


@pytest.mark.parametrize("model", [None, "", "auto"])
def test_absent_empty_and_auto_model_let_the_router_choose(model: str | None) -> None:
    assert parse_request(body(model=model)).to_inference().model is None


@pytest.mark.parametrize(
    ("stop", "expected"), [("END", ("END",)), (["a", "b"], ("a", "b")), ([], ()), (None, ())]
)
def test_stop_is_one_string_or_many(stop: object, expected: tuple[str, ...]) -> None:
    assert parse_request(body(stop=stop)).to_inference().sampling.stop == expected


def test_text_parts_become_one_text_and_developer_becomes_system() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": []},
    ]
    assert parse_request(body(messages=messages)).to_inference().prompt == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "ab"),
        ChatMessage("assistant", "c"),
    )


@given(st.integers(-(2**63), 2**64 - 1))
def test_every_openai_seed_is_a_seed_of_ours(seed: int) -> None:
    converted = parse_request(body(seed=seed)).to_inference().sampling.seed
    assert converted is not None
    assert 0 <= converted < 2**64
    assert converted % 2**64 == seed % 2**64


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_zero_max_tokens_is_passed_on_to_be_refused_not_replaced_by_the_default(field: str) -> None:
    assert parse_request(body(**{field: 0})).to_inference().sampling.max_tokens == 0


def test_parameters_that_change_nothing_are_ignored() -> None:
    parse_request(
        body(
            user="me",
            store=True,
            metadata={"a": "b"},
            something_new=[1],
            n=1,
            tools=[],
            tool_choice="auto",
            response_format={"type": "text"},
            logprobs=False,
            logit_bias={},
            presence_penalty=0.0,
            frequency_penalty=0,
            top_logprobs=None,
        )
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"1": 5}),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("grammar", "root ::= x"),
    ],
)
def test_parameters_that_would_change_the_answer_are_refused_by_name(
    field: str, value: object
) -> None:
    failure = refusal(body(**{field: value}))
    assert failure.param == field
    assert failure.code == "unsupported_parameter"
    assert field in failure.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 10.5}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": 7}, "model"),
        ({"pointsman": {"min_quality": 0.5}}, "pointsman.min_quality"),
        ({"pointsman": {"deadline_seconds": "1"}}, "pointsman.deadline_seconds"),
        ({"pointsman": {"request_id": ""}}, "pointsman.request_id"),
        ({"pointsman": {"request_id": "two words"}}, "pointsman.request_id"),
        ({"pointsman": {"request_id": "x\r\nset-cookie: a"}}, "pointsman.request_id"),
        ({"pointsman": {"request_id": "x\n"}}, "pointsman.request_id"),
        ({"pointsman": {"request_id": "x" * 129}}, "pointsman.request_id"),
    ],
)
def test_wrong_field_is_named(fields: dict[str, object], param: str) -> None:
    failure = refusal(body(**fields))
    assert failure.param == param
    assert failure.message.startswith(f"{param}") or failure.message.startswith("max_tokens and")


def test_misspelt_routing_limit_is_refused_with_the_known_ones() -> None:
    assert "min_quality_ratio" in refusal(body(pointsman={"min_quality": 1})).message


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'{"messages": NaN}', "invalid_json"),
        (b'{"messages": "\\ud800"}', "invalid_json"),
        (b"[" * 5000, "invalid_json"),
        (b'{"messages": "\xff"}', "invalid_utf8"),
        (b"\xff\xfe{}", "invalid_utf8"),
    ],
)
def test_body_that_is_no_json_object_in_utf8_is_refused(data: bytes, code: str) -> None:
    assert refusal(data).code == code


def test_infinite_temperature_is_refused() -> None:
    assert refusal(b'{"messages": [], "temperature": 1e999}').status == 400


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PUBLIC_ERRORS, ids=lambda kind: kind.__name__)
def test_every_public_error_has_openai_shape(kind: type) -> None:
    failure = failure_of(kind("It is so."))
    assert failure.status == PUBLIC_ERRORS[kind].http_status
    error = failure.body()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == "It is so."
    assert error["code"] == PUBLIC_ERRORS[kind].code
    is_server_fault = error["type"] == "server_error"
    assert is_server_fault == (failure.status >= 500)


def test_unknown_model_names_its_parameter() -> None:
    assert failure_of(UnknownModelError("no")).param == "model"
    assert failure_of(InvalidRequestError("no")).param is None


# -- answers --------------------------------------------------------------------------------------


def test_whole_answer_is_a_chat_completion() -> None:
    answer = ChatCompletion.model_validate(chat_completion(ACCOUNT, "Hi!", 1700000000), strict=True)
    assert answer.id == "req-1"
    assert answer.model == "smol"
    assert answer.created == 1700000000
    assert answer.choices[0].message.content == "Hi!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 3)
    assert answer.usage.total_tokens == 15


def test_whole_answer_carries_the_account() -> None:
    story = chat_completion(ACCOUNT, "Hi!", 0)["pointsman"]
    assert story["node_id"] == "pi"
    assert story["policy"] == "memetic"
    assert story["batch_id"] == "batch-7"
    assert story["energy_joules"] == 2.5
    assert story["energy_source"] == "estimate"
    assert story["predicted_finish_seconds"] == 0.5
    assert story["measured_finish_seconds"] == 0.6


def test_unknown_energy_is_null_not_zero() -> None:
    assert chat_completion(ended(FinishReason.STOP), "", 0)["pointsman"]["energy_joules"] is None


@pytest.mark.parametrize(
    ("reason", "expected"), [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length")]
)
def test_finish_reasons_keep_their_meaning(reason: FinishReason, expected: str) -> None:
    account = ended(reason)
    assert account_failure(account) is None
    assert chat_completion(account, "", 0)["choices"][0]["finish_reason"] == expected


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.FAILED])
def test_answer_that_was_cut_off_is_a_failure_never_a_stop(reason: FinishReason) -> None:
    failure = account_failure(ended(reason, "the engine was told to stop"))
    assert failure is not None
    assert failure.status == 502
    assert "the engine was told to stop" in failure.message


def stream_of(includes_usage: bool) -> list[dict[str, object]]:
    chunks = ChunkBuilder(RequestId("req-1"), "auto", 1700000000, includes_usage)
    return [
        *chunks.routed(ROUTED),
        *chunks.text(Text("Hé", 2)),
        *chunks.text(Text("", 1)),
        *chunks.text(Text("llo", 1)),
        *chunks.finished(ACCOUNT),
    ]


def test_chunks_are_what_openai_clients_expect() -> None:
    chunks = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in stream_of(False)]
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None, None]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Héllo"
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, None, "stop"]
    assert {chunk.model for chunk in chunks} == {"smol"}
    assert {chunk.id for chunk in chunks} == {"req-1"}
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_chunk_comes_last_and_without_a_choice_when_asked_for() -> None:
    *others, last = stream_of(True)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
    assert all(chunk["usage"] is None for chunk in others)
    assert not any("usage" in chunk for chunk in stream_of(False))


def test_stream_says_where_it_went_first_and_what_it_cost_last() -> None:
    first, *_, last = stream_of(False)
    assert first["pointsman"] == {
        "request_id": "req-1",
        "node_id": "pi",
        "model": "smol",
        "policy": "memetic",
        "batch_id": "batch-7",
    }
    assert last["pointsman"] == chat_completion(ACCOUNT, "", 0)["pointsman"]


def test_request_that_moved_names_its_new_node_and_model() -> None:
    chunks = ChunkBuilder(RequestId("req-1"), "auto", 0, False)
    chunks.routed(ROUTED)
    (moved,) = chunks.routed(RoutedTo(NodeId("vm"), ModelName("gemma"), BatchId("b"), "memetic"))
    assert moved["choices"][0]["delta"] == {}  # the role has been said
    assert moved["pointsman"]["node_id"] == "vm"
    assert chunks.text(Text("x", 1))[0]["model"] == "gemma"


def test_answer_of_one_text_without_a_routing_event_still_has_its_role() -> None:
    chunks = ChunkBuilder(RequestId("req-1"), "smol", 0, False)
    assert chunks.text(Text("x", 1))[0]["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "x",
    }


def test_json_has_no_nan_and_keeps_unicode() -> None:
    assert (
        to_json({"a": math.nan, "b": math.inf, "c": "é"}) == '{"a":null,"b":null,"c":"é"}'.encode()
    )


def test_models_are_listed_with_auto_last() -> None:
    served = ServedModel(ModelName("smol"), "smollm2", 0.135, "Q8_0", 2048, (NodeId("pi"),))
    listed = model_list([served], 1700000000)
    assert [Model.model_validate(model, strict=True).id for model in listed] == ["smol", "auto"]
    assert listed[0]["pointsman"]["context_tokens"] == 2048
    assert listed[0]["pointsman"]["node_ids"] == ["pi"]


def test_auto_is_not_listed_when_no_model_is_served() -> None:
    assert model_list([], 0) == []


def test_reference_page_lists_every_field() -> None:
    page = (Path(__file__).parents[4] / "docs" / "http-api.md").read_text(encoding="utf-8")
    names = {
        *ChatCompletionRequest.model_fields,
        *RoutingOptions.model_fields,
        *chat_completion(ACCOUNT, "", 0)["pointsman"],
    }
    assert {name for name in names if f"`{name}`" not in page} == set()


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ResponseFormat(FormatKind.JSON_OBJECT)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
            ResponseFormat(FormatKind.JSON_SCHEMA, '{"type": "object"}'),
        ),
    ],
)
def test_response_format_is_taken_as_openai_writes_it(
    option: object, expected: ResponseFormat | None
) -> None:
    request = parse_request(body(response_format=option)).to_inference()
    assert request.response_format == expected


@pytest.mark.parametrize(
    ("option", "param"),
    [
        ({"type": "yaml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "response_format"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
    ],
)
def test_response_format_that_says_nothing_clear_is_refused(option: object, param: str) -> None:
    failure = refusal(body(response_format=option))
    assert (failure.status, failure.param) == (400, param)


def test_conversation_and_grammar_are_options_of_our_own() -> None:
    given = {"session_id": "talk-1", "grammar": "root ::= [0-9]+"}
    request = parse_request(body(pointsman=given)).to_inference()
    assert request.session_id == "talk-1"
    assert request.response_format == ResponseFormat(FormatKind.GRAMMAR, "root ::= [0-9]+")
    both = body(pointsman=given, response_format={"type": "json_object"})
    assert refusal(both).param == "pointsman.grammar"
