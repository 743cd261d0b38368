"""What every engine refuses before it starts a generation."""

import math
from typing import Final

from edge_agent.engine.base import GenerationRequest, RejectedError, RejectionKind
from edge_agent.engine.response_format import check_response_format

ROLES: Final = frozenset({"system", "user", "assistant"})
MAX_STOP_STRINGS: Final = 16
_MAX_SEED: Final = 2**64 - 1
_MAX_INT32: Final = 2**31 - 1


def check_request(request: GenerationRequest) -> None:
    """Accept a request whose every field is one that an engine can act on.

    Raises:
        RejectedError: INVALID_REQUEST, naming the field and what it must be.
    """
    problem = _prompt_problem(request) or _sampling_problem(request)
    if problem is not None:
        raise RejectedError(RejectionKind.INVALID_REQUEST, problem)
    if request.response_format is not None:
        check_response_format(request.response_format)


def _prompt_problem(request: GenerationRequest) -> str | None:
    if not request.key:
        return "The request's key is empty."
    if isinstance(request.prompt, str):
        if not request.prompt:
            return "The prompt is empty."
        return _text_problem("The prompt", request.prompt)
    if not request.prompt:
        return "The chat has no messages."
    if not any(message.content for message in request.prompt):
        return "Every message of the chat is empty."
    for message in request.prompt:
        if message.role not in ROLES:
            return f'The role {message.role!r} is none of "system", "user" and "assistant".'
        problem = _text_problem("A message", message.content)
        if problem is not None:
            return problem
    return None


def _text_problem(what: str, text: str) -> str | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return f"{what} has half of a surrogate pair in it, which is not valid Unicode."
    return None


def _sampling_problem(request: GenerationRequest) -> str | None:
    sampling = request.sampling
    if not 1 <= sampling.max_tokens <= _MAX_INT32:
        return f"max_tokens must be at least 1, not {sampling.max_tokens}."
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature must be 0 or more, not {sampling.temperature}."
    if not 0 < sampling.top_p <= 1:
        return f"top_p must be above 0 and at most 1, not {sampling.top_p}."
    if not 0 <= sampling.top_k <= _MAX_INT32:
        return f"top_k must be 0 or more, not {sampling.top_k}."
    if sampling.seed is not None and not 0 <= sampling.seed <= _MAX_SEED:
        return f"seed must be between 0 and 2^64 - 1, not {sampling.seed}."
    if len(sampling.stop) > MAX_STOP_STRINGS:
        return f"At most {MAX_STOP_STRINGS} stop strings are allowed, not {len(sampling.stop)}."
    for stop in sampling.stop:
        if not stop:
            return "A stop string is empty."
        problem = _text_problem("A stop string", stop)
        if problem is not None:
            return problem
    return None
