"""Makes a grammar of a response format; part of an engine's child, since it imports llama.cpp."""

import json
from typing import Any, Final

from llama_cpp.llama_grammar import BuiltinRule, SchemaConverter

from edge_agent.engine.base import FormatKind, RejectedError, RejectionKind, ResponseFormat
from edge_agent.engine.response_format import reduced_schema

# A string of JSON has no raw control characters, which llama-cpp-python 0.3.36 lets through.
_CHARACTER: Final = (
    r'[^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] |'
    ' "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F])'
)


class _Converter(SchemaConverter):
    """llama-cpp-python's converter, with the texts of constants and properties kept as they are.

    Up to 0.3.36 it leaves a backslash in them as the beginning of an escape of the grammar's own.
    """

    def _format_literal(self, literal: str) -> str:
        escaped = literal.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'

    def _generate_constant_rule(self, value: object) -> str:
        return self._format_literal(json.dumps(value, ensure_ascii=False))

    def _add_primitive(self, name: str, rule: BuiltinRule) -> Any:
        if name == "char":
            rule = BuiltinRule(_CHARACTER, [])
        return super()._add_primitive(name, rule)


def grammar_of(wanted: ResponseFormat) -> str:
    """The grammar, in GBNF with a rule named root, that keeps a format.

    Raises:
        RejectedError: INVALID_REQUEST; the format cannot be made a grammar.
    """
    if wanted.kind is FormatKind.GRAMMAR:
        return wanted.text
    text = wanted.text if wanted.kind is FormatKind.JSON_SCHEMA else '{"type":"object"}'
    schema = reduced_schema(text)
    make: Any = _Converter  # whose base has no types
    try:
        converter = make(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        converter.visit(converter.resolve_refs(schema, ""), "")
        return str(converter.format_grammar())
    except Exception as error:
        # The converter asserts, and fails in Python's own ways, where a schema is beyond it.
        raise RejectedError(
            RejectionKind.INVALID_REQUEST,
            f"The JSON Schema cannot be made a grammar: {type(error).__name__}: {error}.",
        ) from error
