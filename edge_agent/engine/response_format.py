"""Which response formats can be kept, and what a schema comes down to before it is a grammar.

A grammar lets through exactly what it says, so a constraint that it cannot say must be refused:
an answer that ends well has to keep the schema that was sent. Pure; imports nothing heavy.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from edge_agent.engine.base import FormatKind, RejectedError, RejectionKind, ResponseFormat

Json = dict[str, Any]

# Far above what people write, and small enough that no parser of grammars can be driven deep
# into its recursion or kept busy for long.
MAX_FORMAT_CHARACTERS: Final = 65_536
MAX_SCHEMA_DEPTH: Final = 24
MAX_SCHEMA_PARTS: Final = 2_000
MAX_GROUP_DEPTH: Final = 64
MAX_REPEATS: Final = 1_000

_NOTES: Final = frozenset(
    {
        "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default",
        "examples", "deprecated", "readOnly", "writeOnly",
    }
)  # fmt: skip
_BY_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset(),
    "integer": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
_ALONE: Final = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_FORMATS: Final = frozenset({"date", "time", "date-time", "uuid"})
_CLASSES: Final = {"d": "[0-9]", "w": "[a-zA-Z0-9_]"}


class _SchemaError(Exception):
    """A schema cannot be kept; the text says why, and where."""


def check_response_format(wanted: ResponseFormat) -> None:
    """Accept a format that is well-formed, small enough, and can be kept.

    Raises:
        RejectedError: INVALID_REQUEST with a sentence that says what is wrong and where.
    """
    problem = _problem(wanted)
    if problem is not None:
        raise RejectedError(RejectionKind.INVALID_REQUEST, problem)


def reduced_schema(text: str) -> Json:
    """The schema that is to be made a grammar, in the keywords that a grammar can express.

    Args:
        text: a JSON Schema that `check_response_format` has accepted.

    Raises:
        RejectedError: INVALID_REQUEST, for a schema that it has not.
    """
    try:
        return _reduced(text)
    except _SchemaError as error:
        raise RejectedError(RejectionKind.INVALID_REQUEST, str(error)) from error


def _problem(wanted: ResponseFormat) -> str | None:
    text = wanted.text
    if len(text) > MAX_FORMAT_CHARACTERS:
        return (
            f"The response format has {len(text)} characters; at most {MAX_FORMAT_CHARACTERS}"
            " are allowed."
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        return "The response format has half of a surrogate pair in it, which is no valid Unicode."
    if "\0" in text:
        return "The response format has a NUL character in it."
    match wanted.kind:
        case FormatKind.JSON_OBJECT:
            return "A json_object format takes no text." if text else None
        case FormatKind.GRAMMAR:
            return _grammar_problem(text)
        case FormatKind.JSON_SCHEMA:
            try:
                _reduced(text)
            except _SchemaError as error:
                return str(error)
            return None


def _grammar_problem(text: str) -> str | None:
    if not re.search(r"(?m)^\s*root\s*::=", text):
        return 'The grammar has no rule named root; begin it with "root ::= ...".'
    depth = deepest = 0
    # Literals, classes and comments may hold brackets that group nothing.
    for bracket in re.findall(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[()]', text):
        depth += {"(": 1, ")": -1}.get(bracket, 0)
        deepest = max(deepest, depth)
    if deepest > MAX_GROUP_DEPTH:
        return f"The grammar nests {deepest} groups; at most {MAX_GROUP_DEPTH} are allowed."
    return None


def _reduced(text: str) -> Json:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _SchemaError(f"The JSON Schema is no valid JSON: {error}.") from error
    if not isinstance(schema, dict):
        raise _SchemaError("The JSON Schema must be a JSON object.")
    reducer = _Reducer(schema)
    reduced = reducer.visit(schema, "#", 0)
    for name in ("$defs", "definitions"):
        definitions = schema.get(name)
        if definitions is None:
            continue
        if not isinstance(definitions, dict):
            raise _SchemaError(f"#/{name} of the JSON Schema must be an object.")
        reduced[name] = {
            key: reducer.visit(value, f"#/{name}/{key}", 1) for key, value in definitions.items()
        }
    reducer.check_cycles()
    return reduced


class _Reducer:
    """Walks one schema, refusing what cannot be kept and dropping what constrains nothing."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._parts = 0
        # Definition -> definitions that it is nothing but another name for.
        self._aliases: dict[str, list[str]] = {}

    def visit(self, schema: object, at: str, depth: int) -> Json:
        self._parts += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise _SchemaError(
                f"The JSON Schema is nested deeper than {MAX_SCHEMA_DEPTH} at {at}; use $ref."
            )
        if self._parts > MAX_SCHEMA_PARTS:
            raise _SchemaError(f"The JSON Schema has more than {MAX_SCHEMA_PARTS} parts.")
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise _SchemaError(f"The JSON Schema has no schema at {at}.")
        kept = {key: value for key, value in schema.items() if key not in _NOTES}
        for key in _ALONE:
            if key in kept:
                return self._alone(key, kept, at, depth)
        return self._typed(kept, at, depth)

    def check_cycles(self) -> None:
        """Refuse definitions that only refer to each other and so say nothing."""
        for start in self._aliases:
            seen: set[str] = set()
            todo = [start]
            while todo:
                for target in self._aliases.get(todo.pop(), ()):
                    if target == start:
                        raise _SchemaError(f"The JSON Schema's {start} refers only to itself.")
                    if target not in seen:
                        seen.add(target)
                        todo.append(target)

    def _alone(self, key: str, kept: Json, at: str, depth: int) -> Json:
        value = kept[key]
        # A type beside an enum or a const says again what the values say.
        others = set(kept) - {key} - ({"type"} if key in ("enum", "const") else set())
        if others:
            raise _SchemaError(
                f'The JSON Schema has "{key}" together with "{min(others)}" at {at};'
                " both at once cannot be kept here."
            )
        if key == "$ref":
            return {"$ref": self._reference(value, at)}
        if key == "const":
            return {"const": value}
        if key == "enum":
            if not isinstance(value, list) or not value:
                raise _SchemaError(f'"enum" must be a list with values in it at {at}.')
            self._parts += len(value)
            return {"enum": value}
        if not isinstance(value, list) or not value:
            raise _SchemaError(f'"{key}" must be a list with schemas in it at {at}.')
        if key == "allOf":
            if len(value) > 1:
                raise _SchemaError(f'"allOf" of several schemas at {at} cannot be kept here.')
            return self.visit(value[0], f"{at}/allOf/0", depth + 1)
        choices = [
            self.visit(choice, f"{at}/{key}/{i}", depth + 1) for i, choice in enumerate(value)
        ]
        for choice in choices:
            if "$ref" in choice:
                self._aliases.setdefault(at, []).append(choice["$ref"])
        return {"anyOf": choices}

    def _reference(self, value: object, at: str) -> str:
        target: object = self._root
        if not isinstance(value, str) or not re.fullmatch(r"#/(\$defs|definitions)/[^/]+", value):
            raise _SchemaError(
                f'"$ref" at {at} must name one of this schema\'s own definitions, such as'
                " #/$defs/Item."
            )
        for part in value[2:].split("/"):
            if not isinstance(target, dict) or part not in target:
                raise _SchemaError(f'"$ref" at {at} names {value}, which is not there.')
            target = target[part]
        self._aliases.setdefault(at, []).append(value)
        return value

    def _typed(self, kept: Json, at: str, depth: int) -> Json:
        kind = kept.pop("type", None)
        if isinstance(kind, list):
            if not kind:
                raise _SchemaError(f'"type" is an empty list at {at}.')
            used = frozenset().union(*(self._allowed(one, at) for one in kind))
            self._refuse_unknown(kept, used, at)
            return {
                "anyOf": [
                    self._typed(
                        {"type": one, **{k: v for k, v in kept.items() if k in _BY_TYPE[one]}},
                        at,
                        depth,
                    )
                    for one in kind
                ]
            }
        if kind is None:
            kinds = [name for name, keys in _BY_TYPE.items() if keys & set(kept)]
            if not kept:
                return {}
            if len(kinds) != 1:
                key = min(kept)
                raise _SchemaError(
                    f'The JSON Schema uses "{key}" without a type at {at}, which cannot be kept'
                    " here; say the type, or leave it out and check the answer."
                )
            kind = kinds[0]
        self._refuse_unknown(kept, self._allowed(kind, at), at)
        if kind == "object":
            return self._object(kept, at, depth)
        if kind == "array":
            return self._array(kept, at, depth)
        if kind == "string":
            return self._string(kept, at)
        return {"type": kind}

    def _allowed(self, kind: object, at: str) -> frozenset[str]:
        if not isinstance(kind, str) or kind not in _BY_TYPE:
            raise _SchemaError(f'"type" is {kind!r} at {at}, which is no type of JSON Schema.')
        return _BY_TYPE[kind]

    def _refuse_unknown(self, kept: Json, allowed: frozenset[str], at: str) -> None:
        unknown = set(kept) - allowed
        if unknown:
            raise _SchemaError(
                f'The JSON Schema uses "{min(unknown)}" at {at}, which cannot be kept here;'
                " leave it out and check the answer."
            )

    def _object(self, kept: Json, at: str, depth: int) -> Json:
        properties = kept.get("properties", {})
        required = kept.get("required", [])
        if not isinstance(properties, dict):
            raise _SchemaError(f'"properties" must be an object at {at}.')
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _SchemaError(f'"required" must be a list of names at {at}.')
        for name in required:
            if name not in properties:
                raise _SchemaError(
                    f'"required" names {name!r} at {at}, which is not among its "properties".'
                )
        more = kept.get("additionalProperties")
        if not properties and more is None:
            return {"type": "object"}
        reduced: Json = {
            "type": "object",
            "properties": {
                name: self.visit(value, f"{at}/properties/{name}", depth + 1)
                for name, value in properties.items()
            },
            "required": required,
            # Absent means allowed, but models then go on inventing properties: an object of the
            # named ones keeps the schema as well.
            "additionalProperties": False,
        }
        if isinstance(more, dict) and not properties:
            reduced["additionalProperties"] = self.visit(
                more, f"{at}/additionalProperties", depth + 1
            )
        elif more is True and not properties:
            return {"type": "object"}
        elif more is not None and not isinstance(more, bool | dict):
            raise _SchemaError(f'"additionalProperties" must be a schema at {at}.')
        return reduced

    def _array(self, kept: Json, at: str, depth: int) -> Json:
        if "prefixItems" in kept:
            items = kept.pop("prefixItems")
            if kept.pop("items", False) not in (False, True) or kept:
                raise _SchemaError(f'"prefixItems" must be alone in an array at {at}.')
            if not isinstance(items, list) or not items:
                raise _SchemaError(f'"prefixItems" must be a list of schemas at {at}.')
            return {
                "type": "array",
                "prefixItems": [
                    self.visit(item, f"{at}/prefixItems/{i}", depth + 1)
                    for i, item in enumerate(items)
                ],
            }
        least = _count(kept, "minItems", at)
        most = _count(kept, "maxItems", at)
        if most is not None and most < (least or 0):
            raise _SchemaError(f'"maxItems" is below "minItems" at {at}.')
        items = self.visit(kept.get("items", True), f"{at}/items", depth + 1)
        if not items and least is None and most is None:
            return {"type": "array"}
        # An empty schema counts as none in the converter.
        reduced: Json = {"type": "array", "items": items or {"anyOf": [{}]}}
        if least is not None:
            reduced["minItems"] = least
        if most is not None:
            reduced["maxItems"] = most
        return reduced

    def _string(self, kept: Json, at: str) -> Json:
        least = _count(kept, "minLength", at)
        most = _count(kept, "maxLength", at)
        pattern = kept.get("pattern")
        form = kept.get("format")
        if most is not None and most < (least or 0):
            raise _SchemaError(f'"maxLength" is below "minLength" at {at}.')
        has_length = least is not None or most is not None
        if pattern is not None and (has_length or form is not None):
            raise _SchemaError(f'"pattern" must be alone in a string at {at}.')
        if pattern is not None:
            return {"type": "string", "pattern": _plain_pattern(pattern, at)}
        if form in _FORMATS:
            if has_length:
                raise _SchemaError(f'"format" must be alone in a string at {at}.')
            return {"type": "string", "format": form}
        reduced: Json = {"type": "string"}
        if least is not None:
            reduced["minLength"] = least
        if most is not None:
            reduced["maxLength"] = most
        return reduced


def _count(kept: Json, key: str, at: str) -> int | None:
    value = kept.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_REPEATS:
        raise _SchemaError(
            f'"{key}" must be a whole number between 0 and {MAX_REPEATS} at {at}, not {value!r}.'
        )
    return value


def _plain_pattern(pattern: object, at: str) -> str:
    """A pattern in characters that mean the same to a grammar within a JSON string."""
    if not isinstance(pattern, str):
        raise _SchemaError(f'"pattern" must be a string at {at}.')
    if not (pattern.startswith("^") and pattern.endswith("$") and len(pattern) > 2):
        raise _SchemaError(f'"pattern" must begin with ^ and end with $ at {at}.')
    body = re.sub(r"\\([dw])", lambda found: _CLASSES[found[1]], pattern[1:-1])
    body = re.sub(r"\\([-.:/+*?()])", r"[\1]", body)
    try:
        re.compile(body)
    except (re.error, RecursionError) as error:
        raise _SchemaError(f'"pattern" at {at} is no regular expression: {error}.') from error
    outside = re.sub(r"\[[A-Za-z0-9_ :;,@#%&=+*?()./-]+\]", "", body)
    if not re.fullmatch(r"[A-Za-z0-9_ :;,@#%&=/(){}|+*?-]*", outside) or "(?" in outside:
        raise _SchemaError(
            f'"pattern" at {at} uses what cannot be kept here; use letters, digits, classes such'
            r" as [a-z] or \d, groups, | and the quantifiers * + ? {m,n}."
        )
    for numbers in re.findall(r"\{([0-9,]*)\}", outside):
        if any(int(number) > MAX_REPEATS for number in numbers.split(",") if number):
            raise _SchemaError(f'"pattern" at {at} repeats more than {MAX_REPEATS} times.')
    return f"^{body}$"
