"""What a refusal means for a request and for its endpoint."""

from dataclasses import replace

import pytest

from edge_agent.engine.base import RejectedError, RejectionKind
from edge_agent.engine.remote.endpoint import RemoteError, RemoteIssue
from edge_agent.engine.remote.refusals import (
    Asked,
    NoCompletionsError,
    ParameterRefusedError,
    TooBusyError,
    meaning_of_error_frame,
    meaning_of_response,
    shown_words,
)

ASKED = Asked("http://server/v1", "", is_raw=False, fits=True, can_do_without=lambda *_: False)


def test_missing_completions_are_for_raw_prompts_only() -> None:
    raw = replace(ASKED, is_raw=True)
    assert isinstance(meaning_of_response(404, {}, "", None, raw), NoCompletionsError)
    found = meaning_of_response(404, {}, "", None, ASKED)
    assert not isinstance(found, NoCompletionsError)


@pytest.mark.parametrize(("header", "pause"), [("3", 3.0), ("9999", 60.0), (None, None)])
def test_busy_endpoint_is_left_alone_for_as_long_as_it_says(
    header: str | None, pause: float | None
) -> None:
    found = meaning_of_response(429, {}, "", header, ASKED)
    assert isinstance(found, TooBusyError)
    assert found.pause_seconds == pause
    assert found.kind is RejectionKind.QUEUE_FULL


def test_endpoint_that_is_away_is_no_busy_one() -> None:
    found = meaning_of_response(503, {}, "", None, ASKED)
    assert isinstance(found, RemoteError)
    assert found.issue is RemoteIssue.UNREACHABLE


def test_parameter_it_can_do_without_is_named() -> None:
    asked = replace(ASKED, can_do_without=lambda parameter, code: parameter == "top_k")
    found = meaning_of_response(400, {"param": "top_k", "code": "x"}, "", None, asked)
    assert isinstance(found, ParameterRefusedError)
    assert str(found) == "top_k"


def test_context_is_exceeded_by_its_code_or_by_our_own_count() -> None:
    for error, fits in (({"code": "context_length_exceeded"}, True), ({}, False)):
        found = meaning_of_response(400, error, "", None, replace(ASKED, fits=fits))
        assert isinstance(found, RejectedError)
        assert found.kind is RejectionKind.CONTEXT_EXCEEDED
    found = meaning_of_response(400, {}, "", None, ASKED)
    assert isinstance(found, RejectedError)
    assert found.kind is RejectionKind.INVALID_REQUEST


def test_error_in_mid_answer_fails_that_answer_only() -> None:
    found = meaning_of_error_frame({"code": "context_length_exceeded"}, "", has_answered=True)
    assert isinstance(found, RemoteError)
    assert not found.is_down
    early = meaning_of_error_frame({"type": "rate_limit_error"}, "", has_answered=False)
    assert isinstance(early, RejectedError)
    assert early.kind is RejectionKind.QUEUE_FULL


def test_words_are_short_on_one_line_and_without_the_key() -> None:
    assert shown_words("bad  key\nsecret-1.", "secret-1") == ": bad key ****"
    assert len(shown_words("x" * 1000, "")) < 310
    assert shown_words(None, "") == shown_words("  ", "") == ""
