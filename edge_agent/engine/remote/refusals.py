"""What it means when an OpenAI-compatible server does not answer a request (pure)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from edge_agent.engine.base import RejectedError, RejectionKind
from edge_agent.engine.remote.endpoint import (
    RemoteError,
    RemoteIssue,
    endpoint_failure,
    retry_after_seconds,
)

_LONGEST_PAUSE_SECONDS: Final = 60.0
_MAX_WORDS: Final = 300
_CONTEXT_CODES: Final = frozenset({"context_length_exceeded", "exceed_context_size_error"})


class ParameterRefusedError(Exception):
    """The server does not know a parameter that it can do without; the text is its name."""


class NoCompletionsError(RejectedError):
    """The server has no /completions, so it takes no raw prompts."""

    def __init__(self) -> None:
        super().__init__(
            RejectionKind.INVALID_REQUEST,
            "This endpoint takes chats only, for it has no /completions; send messages.",
        )


class TooBusyError(RejectedError):
    """The server wants to be left alone for `pause_seconds`; None when it does not say."""

    def __init__(self, message: str, pause_seconds: float | None) -> None:
        super().__init__(RejectionKind.QUEUE_FULL, message)
        self.pause_seconds = pause_seconds


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked, as far as it decides what a refusal means.

    Attributes:
        base_url: of the endpoint.
        key_source: where the API key comes from, for people.
        is_raw: a raw prompt, so that /completions was asked.
        fits: whether prompt and answer fit the context, by our own count.
        can_do_without: (parameter, code) -> whether it is left out from now on.
    """

    base_url: str
    key_source: str
    is_raw: bool
    fits: bool
    can_do_without: Callable[[object, object], bool]


def meaning_of_response(
    status: int, error: Mapping[str, Any], words: str, retry_after: str | None, asked: Asked
) -> RemoteError | RejectedError | ParameterRefusedError:
    """What a response with another status than 200 means.

    Args:
        error: the error object of its body; empty when there is none.
        words: see `shown_words`.
        retry_after: the header of that name.
    """
    code, kind = error.get("code"), error.get("type")
    if status in (404, 405, 501) and asked.is_raw and (not error or code == "not_found"):
        return NoCompletionsError()
    failure = endpoint_failure(
        status, code, f"{asked.base_url}{words and ' says' + words}", asked.key_source
    )
    if failure is not None:
        return failure
    if status in (429, 503):
        pause = retry_after_seconds(retry_after)
        if status == 503 and pause is None:
            return RemoteError(
                RemoteIssue.UNREACHABLE, f"{asked.base_url} is not available now{words}."
            )
        pause = None if pause is None else min(pause, _LONGEST_PAUSE_SECONDS)
        return TooBusyError(f"The endpoint has too many requests{words}.", pause)
    if status >= 500 or status == 408:
        return RemoteError(
            RemoteIssue.FAILED,
            f"The endpoint failed with HTTP status {status}{words}.",
            is_down=status in (502, 504),
        )
    if asked.can_do_without(error.get("param"), code):
        return ParameterRefusedError(error["param"])
    # vLLM has no code for it; by our own count the request does not fit then.
    is_unnamed = error.get("param") is None and code in (None, status)
    if {code, kind} & _CONTEXT_CODES or (is_unnamed and not asked.fits):
        return RejectedError(
            RejectionKind.CONTEXT_EXCEEDED,
            f"The prompt and its answer do not fit the endpoint's context{words}.",
        )
    return RejectedError(
        RejectionKind.INVALID_REQUEST,
        f"The endpoint refuses the request with HTTP status {status}{words}."
        " (If a parameter is at fault, list it in omit_parameters.)",
    )


def meaning_of_error_frame(
    error: object, words: str, has_answered: bool
) -> RemoteError | RejectedError:
    """What an error in the middle of a stream means.

    Args:
        error: as the server sent it.
        words: see `shown_words`.
        has_answered: some of the answer had come before.
    """
    about = error if isinstance(error, dict) else {}
    if not has_answered:
        names = {str(about.get("code")), str(about.get("type"))}
        if names & _CONTEXT_CODES:
            return RejectedError(
                RejectionKind.CONTEXT_EXCEEDED,
                f"The prompt and its answer do not fit the endpoint's context{words}.",
            )
        if "rate_limit_error" in names:
            return RejectedError(
                RejectionKind.QUEUE_FULL, f"The endpoint has too many requests{words}."
            )
        if "invalid_request_error" in names:
            return RejectedError(
                RejectionKind.INVALID_REQUEST, f"The endpoint refuses the request{words}."
            )
    return RemoteError(
        RemoteIssue.FAILED, f"The endpoint ended the answer with an error{words}.", is_down=False
    )


def shown_words(message: object, key: str) -> str:
    """What the endpoint said, fit to be shown: short, on one line, without our key.

    Args:
        key: "" for none.

    Returns:
        ": " and the words; "" where it said nothing.
    """
    if not isinstance(message, str) or not message.strip():
        return ""
    text = " ".join(message.split())
    if key:
        text = text.replace(key, "****")
    return f": {text[:_MAX_WORDS].rstrip('.')}"
