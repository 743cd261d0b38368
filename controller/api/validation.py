"""Whether a request makes sense, before it costs anybody anything."""

import json
import math
import re

from controller.domain.request import FormatKind, InferenceRequest, ResponseFormat
from controller.errors import InvalidRequestError

_ROLES = ("system", "user", "assistant")
_MAX_ID_CHARACTERS = 128
_MAX_STOP_STRINGS = 16
_MAX_FORMAT_BYTES = 65_536
"""What an engine compiles to a grammar in reasonable time."""

_ROOT_RULE = re.compile(r"^\s*root\s*::=", re.MULTILINE)
_MAX_INT32 = 2**31 - 1
"""What the wire carries."""


def check_request(request: InferenceRequest, max_prompt_bytes: int) -> None:
    """Raise at the first thing that is wrong.

    Raises:
        InvalidRequestError: names the field and says what it must be.
    """
    if not request.request_id or len(request.request_id) > _MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"request_id: 1 to {_MAX_ID_CHARACTERS} characters.")
    _check_unicode("request_id", request.request_id)
    _check_unicode("model", request.model or "")
    _check_prompt(request, max_prompt_bytes)
    sampling = request.sampling
    if not 1 <= sampling.max_tokens <= _MAX_INT32:
        raise InvalidRequestError(f"max_tokens: 1 to {_MAX_INT32}, not {sampling.max_tokens}.")
    if not 0 <= sampling.temperature <= 10:
        raise InvalidRequestError(f"temperature: 0 to 10, not {sampling.temperature:g}.")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequestError(f"top_p: above 0 and at most 1, not {sampling.top_p:g}.")
    if not 0 <= sampling.top_k <= _MAX_INT32:
        raise InvalidRequestError(f"top_k: 0 to {_MAX_INT32}, not {sampling.top_k}.")
    if sampling.seed is not None and not 0 <= sampling.seed < 2**64:
        raise InvalidRequestError(f"seed: 0 to 2^64 - 1, not {sampling.seed}.")
    if len(sampling.stop) > _MAX_STOP_STRINGS or not all(sampling.stop):
        raise InvalidRequestError(f"stop: at most {_MAX_STOP_STRINGS} strings, none empty.")
    for stop in sampling.stop:
        _check_unicode("stop", stop)
    if len(request.session_id) > _MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"session_id: at most {_MAX_ID_CHARACTERS} characters.")
    _check_unicode("session_id", request.session_id)
    if request.response_format is not None:
        _check_format(request.response_format)
    limits = request.constraints
    if limits.min_quality_ratio is not None and not 0 <= limits.min_quality_ratio <= 1:
        raise InvalidRequestError(f"min_quality_ratio: 0 to 1, not {limits.min_quality_ratio:g}.")
    if limits.deadline_seconds is not None and not 0 < limits.deadline_seconds < math.inf:
        raise InvalidRequestError(f"deadline_seconds: above 0, not {limits.deadline_seconds:g}.")
    if limits.max_price_usd is not None and not 0 <= limits.max_price_usd < math.inf:
        raise InvalidRequestError(f"max_price_usd: 0 or more, not {limits.max_price_usd:g}.")


def _check_prompt(request: InferenceRequest, max_prompt_bytes: int) -> None:
    if not isinstance(request.prompt, str):
        for message in request.prompt:
            if message.role not in _ROLES:
                raise InvalidRequestError(
                    f"messages: role {message.role!r} is none of {', '.join(_ROLES)}."
                )
    if not request.text.strip():
        raise InvalidRequestError("The prompt is empty; send some text to answer.")
    _check_unicode("The prompt", request.text)
    size = len(request.text.encode())
    if size > max_prompt_bytes:
        raise InvalidRequestError(f"The prompt has {size} bytes; send at most {max_prompt_bytes}.")


def _check_format(given: ResponseFormat) -> None:
    name = given.kind.value
    if given.kind is FormatKind.JSON_OBJECT:
        return
    _check_unicode(f"response_format.{name}", given.text)
    if len(given.text.encode()) > _MAX_FORMAT_BYTES:
        raise InvalidRequestError(f"response_format.{name}: at most {_MAX_FORMAT_BYTES} bytes.")
    if given.kind is FormatKind.GRAMMAR:
        if not _ROOT_RULE.search(given.text):
            raise InvalidRequestError(
                "response_format.grammar: it needs a rule named root, such as root ::= [0-9]+."
            )
        return
    try:
        schema = json.loads(given.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"response_format.{name}: not valid JSON: {error}.") from error
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"response_format.{name}: a JSON Schema is an object.")


def _check_unicode(field: str, text: str) -> None:
    # JSON can name half of a surrogate pair; the wire to the node cannot carry it.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{field}: not valid Unicode text.") from error
