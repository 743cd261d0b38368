"""Made-up JSON that keeps a schema, for the fake engine."""

import json
from typing import Any, Final

from edge_agent.engine.base import FormatKind, RejectedError, RejectionKind, ResponseFormat
from edge_agent.engine.response_format import reduced_schema

_DEEPEST: Final = 6
_FORMATS: Final = {
    "date": "2020-02-02",
    "time": "10:20:30Z",
    "date-time": "2020-02-02T10:20:30Z",
    "uuid": "01234567-89ab-4cde-8f01-23456789abcd",
}


def fake_json(wanted: ResponseFormat, words: str) -> str:
    """A value that keeps a format, as JSON text with the words in its strings.

    Raises:
        RejectedError: INVALID_REQUEST; the format is a grammar or has a pattern, which only a
            real engine can keep.
    """
    if wanted.kind is FormatKind.GRAMMAR:
        raise _beyond("a grammar")
    if wanted.kind is FormatKind.JSON_OBJECT:
        return json.dumps({"answer": words}, ensure_ascii=False)
    root = reduced_schema(wanted.text)
    return json.dumps(_value(root, root, words, 0), ensure_ascii=False)


def _beyond(what: str) -> RejectedError:
    return RejectedError(
        RejectionKind.INVALID_REQUEST, f"The fake engine cannot keep {what}; use a real one."
    )


def _value(schema: dict[str, Any], root: dict[str, Any], words: str, depth: int) -> Any:
    if depth > _DEEPEST * 4:
        raise _beyond("a schema without an end")
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"][2:].split("/"):
            target = target[part]
        return _value(target, root, words, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        # The last choice of something that refers to itself is usually the one that ends.
        choice = schema["anyOf"][-1 if depth > _DEEPEST else 0]
        return _value(choice, root, words, depth + 1)
    kind = schema.get("type", "string")
    if kind == "object":
        required = schema.get("required", ())
        return {
            name: _value(part, root, words, depth + 1)
            for name, part in schema.get("properties", {}).items()
            if depth <= _DEEPEST or name in required
        }
    if kind == "array":
        if "prefixItems" in schema:
            return [_value(item, root, words, depth + 1) for item in schema["prefixItems"]]
        least = schema.get("minItems", 0)
        return [_value(schema["items"], root, words, depth + 1) for _ in range(least)]
    if kind == "string":
        return _string(schema, words)
    return {"integer": 7, "number": 2.5, "boolean": True, "null": None}[kind]


def _string(schema: dict[str, Any], words: str) -> str:
    if "pattern" in schema:
        raise _beyond("a pattern")
    if "format" in schema:
        return _FORMATS[schema["format"]]
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    text: str = words + "." * max(0, least - len(words))
    return text if most is None else text[:most]
