import json
from typing import Any

import pytest

from edge_agent.engine.base import (
    FormatKind,
    GenerationRequest,
    RejectedError,
    RejectionKind,
    ResponseFormat,
)
from edge_agent.engine.response_format import MAX_FORMAT_CHARACTERS, reduced_schema
from edge_agent.engine.validation import check_request

Json = dict[str, Any]


def check(kind: FormatKind, text: str) -> None:
    check_request(GenerationRequest("k", "p", response_format=ResponseFormat(kind, text)))


def refusal(kind: FormatKind, text: str) -> str:
    with pytest.raises(RejectedError) as caught:
        check(kind, text)
    assert caught.value.kind is RejectionKind.INVALID_REQUEST
    assert str(caught.value).endswith(".")
    return str(caught.value)


def deep(levels: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "array", "items": {"type": ["string", "null"]}, "minItems": 1, "maxItems": 3},
        {"enum": ["a", 1, None, {"x": []}]},
        {"type": "string", "enum": ["a"], "description": "one", "default": "a"},
        {"type": "string", "pattern": r"^\d{4}-\d{2}(-\d{2})?$"},
        {"type": "string", "format": "email"},
        {"allOf": [{"type": "string"}]},
        {"type": "object", "additionalProperties": {"type": "number"}},
        {
            "$ref": "#/$defs/Node",
            "$defs": {
                "Node": {
                    "type": "object",
                    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
                }
            },
        },
    ],
)
def test_a_schema_that_a_grammar_can_say_is_accepted(schema: Json) -> None:
    check(FormatKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "integer", "minimum": 3}, '"minimum" at #'),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "#/properties/a"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"type": "object", "required": ["a"]}, "not among"),
        ({"type": "spam"}, "no type"),
        ({"type": []}, "empty list"),
        ({"enum": []}, "values"),
        ({"anyOf": []}, "schemas"),
        ({"allOf": [{"type": "string"}, {"type": "string"}]}, "several"),
        ({"anyOf": [{"type": "string"}], "minLength": 1}, "together"),
        ({"$ref": "https://example.com/schema.json"}, "own definitions"),
        ({"$ref": "#/$defs/Gone"}, "not there"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}, "itself"),
        ({"type": "array", "minItems": -1}, "minItems"),
        ({"type": "array", "maxItems": 10**9}, "maxItems"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "below"),
        ({"type": "string", "minLength": True}, "minLength"),
        ({"type": "string", "pattern": "a+"}, "begin with"),
        ({"type": "string", "pattern": '^"$'}, "kept"),
        ({"type": "string", "pattern": "^.*$"}, "kept"),
        ({"type": "string", "pattern": "^(?=a)b$"}, "kept"),
        ({"type": "string", "pattern": "^[a$"}, "regular expression"),
        ({"type": "string", "pattern": "^a{5000}$"}, "repeats"),
        ({"minLength": 1, "minItems": 1}, "without a type"),
        (deep(40), "deeper"),
        ({"properties": {"a": 3}, "type": "object"}, "no schema"),
        ([], "JSON object"),
        ("x", "JSON object"),
    ],
)
def test_what_a_grammar_cannot_say_is_refused_by_name(schema: object, says: str) -> None:
    assert says in refusal(FormatKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "NaN", "{'a': 1}", '{"a": "\\ud800"'])
def test_what_is_no_json_is_refused(text: str) -> None:
    assert refusal(FormatKind.JSON_SCHEMA, text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rule named root"),
        ('answer ::= "yes"', "no rule named root"),
        ("root ::= " + "(" * 500 + '"a"' + ")" * 500, "nests 500"),
        ('root ::= "a\0b"', "NUL"),
        ('root ::= "\ud800"', "surrogate"),
        ('root ::= "' + "a" * MAX_FORMAT_CHARACTERS + '"', "characters"),
    ],
)
def test_a_grammar_that_could_do_harm_is_refused(text: str, says: str) -> None:
    assert says in refusal(FormatKind.GRAMMAR, text)


def test_brackets_in_literals_group_nothing() -> None:
    check(FormatKind.GRAMMAR, 'root ::= "' + "(" * 200 + '" [(()] # ((((\n')


def test_a_json_object_takes_no_text() -> None:
    check(FormatKind.JSON_OBJECT, "")
    assert "no text" in refusal(FormatKind.JSON_OBJECT, "{}")


def test_reducing_drops_what_constrains_nothing_and_keeps_the_rest() -> None:
    schema = {
        "title": "Person",
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "first"},
            "age": {"type": ["integer", "null"]},
        },
        "required": ["name"],
    }
    assert reduced_schema(json.dumps(schema)) == {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
