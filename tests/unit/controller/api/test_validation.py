import dataclasses
import math
from typing import Any

import pytest

from controller.api.validation import check_request
from controller.domain.request import (
    ChatMessage,
    Constraints,
    FormatKind,
    InferenceRequest,
    ResponseFormat,
    Sampling,
)
from controller.errors import InvalidRequestError
from controller.ids import ModelName, RequestId

MAX_BYTES = 1000
GOOD = InferenceRequest(RequestId("r1"), "Hello")


def changed(**changes: Any) -> InferenceRequest:
    return dataclasses.replace(GOOD, **changes)


def sampled(**changes: Any) -> InferenceRequest:
    return changed(sampling=Sampling(**changes))


def limited(**changes: Any) -> InferenceRequest:
    return changed(constraints=Constraints(**changes))


@pytest.mark.parametrize(
    "request_",
    [
        GOOD,
        changed(request_id=RequestId("x" * 128)),
        changed(prompt="x" * MAX_BYTES),
        changed(prompt="  é 日本語 🙂 "),
        changed(prompt=(ChatMessage("system", ""), ChatMessage("user", "Hi"))),
        changed(prompt=(ChatMessage("user", "Hi"), ChatMessage("assistant", "Yes?"))),
        changed(model=ModelName("smollm2-135m-instruct-q4_1")),
        sampled(max_tokens=1),
        sampled(max_tokens=2**31 - 1),
        sampled(temperature=0.0),
        sampled(temperature=10.0),
        sampled(top_p=1.0),
        sampled(top_k=0),
        sampled(seed=0),
        sampled(seed=2**64 - 1),
        sampled(stop=("\n",) * 16),
        limited(min_quality_ratio=0.0, max_price_usd=0.0, deadline_seconds=0.001),
        limited(min_quality_ratio=1.0, edge_only=True),
    ],
)
def test_request_within_its_limits_passes(request_: InferenceRequest) -> None:
    check_request(request_, MAX_BYTES)


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (changed(request_id=RequestId("")), "request_id"),
        (changed(request_id=RequestId("x" * 129)), "request_id"),
        (changed(request_id=RequestId("r\ud800")), "request_id"),
        (changed(model=ModelName("m\udcff")), "model"),
        (changed(prompt=""), "prompt is empty"),
        (changed(prompt=" \n\t"), "prompt is empty"),
        (changed(prompt=()), "prompt is empty"),
        (changed(prompt=(ChatMessage("user", ""),)), "prompt is empty"),
        (changed(prompt=(ChatMessage("tool", "Hi"),)), "'tool' is none of system, user"),
        (changed(prompt=(ChatMessage("", "Hi"),)), "role ''"),
        (changed(prompt="half \ud83d of a pair"), "not valid Unicode"),
        (changed(prompt=(ChatMessage("user", "half \ud83d"),)), "not valid Unicode"),
        (changed(prompt="x" * (MAX_BYTES + 1)), "1001 bytes; send at most 1000"),
        (changed(prompt="é" * (MAX_BYTES // 2 + 1)), "1002 bytes; send at most 1000"),
        (sampled(max_tokens=0), "max_tokens"),
        (sampled(max_tokens=-1), "max_tokens"),
        (sampled(max_tokens=2**31), "max_tokens"),
        (sampled(temperature=-0.1), "temperature"),
        (sampled(temperature=10.1), "temperature"),
        (sampled(temperature=math.nan), "temperature"),
        (sampled(top_p=0.0), "top_p"),
        (sampled(top_p=1.1), "top_p"),
        (sampled(top_p=math.nan), "top_p"),
        (sampled(top_k=-1), "top_k"),
        (sampled(top_k=2**31), "top_k"),
        (sampled(seed=-1), "seed"),
        (sampled(seed=2**64), "seed"),
        (sampled(stop=("a",) * 17), "stop"),
        (sampled(stop=("a", "")), "stop"),
        (sampled(stop=("\ud800",)), "stop"),
        (limited(min_quality_ratio=-0.1), "min_quality_ratio"),
        (limited(min_quality_ratio=1.1), "min_quality_ratio"),
        (limited(min_quality_ratio=math.nan), "min_quality_ratio"),
        (limited(deadline_seconds=0.0), "deadline_seconds"),
        (limited(deadline_seconds=math.inf), "deadline_seconds"),
        (limited(deadline_seconds=math.nan), "deadline_seconds"),
        (limited(max_price_usd=-1.0), "max_price_usd"),
        (limited(max_price_usd=math.inf), "max_price_usd"),
        (limited(max_price_usd=math.nan), "max_price_usd"),
    ],
)
def test_wrong_field_is_named(request_: InferenceRequest, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        check_request(request_, MAX_BYTES)


@pytest.mark.parametrize(
    "given",
    [
        ResponseFormat(FormatKind.JSON_OBJECT),
        ResponseFormat(FormatKind.JSON_SCHEMA, '{"type": "object"}'),
        ResponseFormat(FormatKind.GRAMMAR, 'root ::= "yes" | "no"'),
    ],
)
def test_sound_response_format_passes(given: ResponseFormat) -> None:
    check_request(changed(response_format=given, session_id="talk"), MAX_BYTES)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ResponseFormat(FormatKind.JSON_SCHEMA, "{"), "not valid JSON"),
        (ResponseFormat(FormatKind.JSON_SCHEMA, "[]"), "is an object"),
        (ResponseFormat(FormatKind.JSON_SCHEMA, '"' + "x" * 70_000), "at most 65536 bytes"),
        (ResponseFormat(FormatKind.JSON_SCHEMA, "\ud800"), "Unicode"),
        (ResponseFormat(FormatKind.GRAMMAR, "answer ::= [0-9]"), "rule named root"),
    ],
)
def test_response_format_that_no_engine_can_keep_is_refused(
    given: ResponseFormat, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        check_request(changed(response_format=given), MAX_BYTES)


def test_endless_session_id_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="session_id"):
        check_request(changed(session_id="x" * 129), MAX_BYTES)
