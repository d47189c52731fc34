"""Builds grammars that constrain Gemma's call notation to a tool's schema, as Lark rules.

Knows: the JSON Schema keywords that this notation supports. Must not know: the token that quotes
strings.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.argument_grammar import build_argument_grammar, has_only_keywords
from app.text.syntax.gemma_calls import is_key
from app.text.syntax.parameter_types import resolve_reference

_MAX_DEPTH = 64  # maximum depth of nested objects and lists
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_WORD_EXPRESSIONS = {"boolean": '("true" | "false")', "null": '"null"'}
_NUMBER_KEYWORDS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "type",
)


def build_gemma_grammar(
    tools: Sequence[Tool],
    literal: MakeLiteral,
    json_schema: MakeJsonSchema,
    *,
    open: str,
    close: str,
    quote: str,
) -> ToolCallGrammar | None:
    """Builds the grammar for `ChatFamily.build_tool_call_grammar`. open, close: the markers around
    a call. Returns None if a schema has constraints that this notation cannot express, such as a
    pattern or a length of strings."""
    calls: list[str] = []
    rules = [*_write_free_value_rules(literal, quote)]
    for index, tool in enumerate(tools):
        schema = _SchemaGrammar(tool, literal, json_schema, quote, prefix=f"tool{index}")
        arguments = schema.write_object(dict(tool.parameters), depth=0)
        if arguments is None or not schema.is_complete or not is_key(tool.name):
            return None
        calls.append(f"{literal(f'{open}call:{tool.name}')} {arguments} {literal(close)}")
        rules += schema.rules
    return ToolCallGrammar(calls=tuple(calls), between="", trigger=open, rules="\n".join(rules))


def _write_free_value_rules(literal: MakeLiteral, quote: str) -> Iterable[str]:
    """Yields the rules of strings and of values without a schema."""
    spelled = literal(quote)
    if spelled.startswith("<["):
        # plain text cannot contain the token
        yield f"gemmatext: {spelled} /(?s:.*)/ {spelled}"
    else:
        # use one terminal: terminals match greedily, so a separate terminal for text would include
        # the quote
        yield "gemmatext: GEMMA_QUOTED"
        yield f"GEMMA_QUOTED: {spelled} GEMMA_TEXT {spelled}"
        yield f"GEMMA_TEXT: /(?s:.*)/ & ~(/(?s:.*)/ {spelled} /(?s:.*)/)"
    yield "gemmakey: /[A-Za-z_][A-Za-z0-9_]{0,63}/"
    yield 'gemmaany: gemmatext | GEMMA_NUMBER | "true" | "false" | "null" | gemmalist | gemmaobject'
    yield "GEMMA_NUMBER: /-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,15})?/"
    yield 'gemmalist: "[" (gemmaany ("," gemmaany)*)? "]"'
    yield 'gemmaobject: "{" (gemmapair ("," gemmapair)*)? "}"'
    yield 'gemmapair: gemmakey ":" gemmaany'


@dataclass(slots=True)
class _SchemaGrammar:
    """The expressions for the values of one tool's arguments. An expression is None if the notation
    cannot express the constraints.

    rules: the rules that the expressions refer to. reference_rules: the rule names of definitions.
    is_complete: whether every definition has an expression.
    """

    tool: Tool
    literal: MakeLiteral
    json_schema: MakeJsonSchema
    quote: str
    prefix: str
    rules: list[str] = field(default_factory=list[str])
    reference_rules: dict[str, str] = field(default_factory=dict[str, str])
    is_complete: bool = True
    num_objects: int = 0

    def write_value(self, schema: Any, depth: int) -> str | None:
        if schema is True or schema == {}:
            return "gemmaany"
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        schema = cast(Mapping[str, Any], schema)
        if "$ref" in schema:
            return self._write_reference(schema, depth)
        for keyword in ("enum", "const", "anyOf"):
            if keyword in schema:
                return self._write_choice(schema, keyword, depth)
        if "type" not in schema and not has_only_keywords(schema):
            return None
        types = _as_list(schema.get("type", list(_TYPES)))
        return _join_alternatives(
            self._write_typed(name, {**schema, "type": name}, depth) for name in types
        )

    def _write_reference(self, schema: Mapping[str, Any], depth: int) -> str | None:
        """Refers to the rule of a definition. Definitions have rules because they may be
        recursive."""
        target = resolve_reference(schema, self.tool.parameters)
        if not has_only_keywords(schema, "$ref") or "$ref" in target:
            return None
        name = self.reference_rules.get(schema["$ref"])
        if name is None:
            name = f"{self.prefix}ref{len(self.reference_rules)}"
            self.reference_rules[schema["$ref"]] = name
            value = self.write_value(target, depth + 1)
            self.is_complete = self.is_complete and value is not None
            self.rules.append(f"{name}: {value}")
        return name

    def write_object(self, schema: Mapping[str, Any], depth: int) -> str | None:
        if "properties" not in schema and has_only_keywords(schema, "type"):
            return "gemmaobject"
        self.num_objects += 1

        def pair(name: str, inner: Any) -> str | None:
            value = self.write_value(inner, depth + 1)
            return f"{self.literal(f'{name}:')} {value}" if value and is_key(name) else None

        prefix = f"{self.prefix}n{self.num_objects}x"
        rules = build_argument_grammar(schema, prefix, separator=self.literal(","), pair=pair)
        if rules is None:
            return None
        self.rules += rules.rules
        return " ".join((self.literal("{"), rules.expression, self.literal("}")))

    def _write_choice(self, schema: Mapping[str, Any], keyword: str, depth: int) -> str | None:
        if keyword == "anyOf":
            # other keywords in the same schema would apply as well
            parts = _as_list(schema["anyOf"]) if has_only_keywords(schema, "anyOf") else []
            return _join_alternatives(self.write_value(part, depth + 1) for part in parts)
        if not has_only_keywords(schema, keyword, "type"):
            return None
        values = _as_list(schema["enum"]) if keyword == "enum" else [schema["const"]]
        return _join_alternatives(map(self._write_literal, values))

    def _write_literal(self, value: Any) -> str | None:
        if isinstance(value, str):
            return None if self.quote in value else self.literal(f"{self.quote}{value}{self.quote}")
        if isinstance(value, list | dict):
            return None
        return self.literal(json.dumps(value))

    def _write_typed(self, name: str, schema: Mapping[str, Any], depth: int) -> str | None:
        match name:
            case "string":
                return "gemmatext" if has_only_keywords(schema, "type") else None
            case "number" | "integer":
                numbers = {key: schema[key] for key in _NUMBER_KEYWORDS if key in schema}
                return self.json_schema(replace(self.tool, parameters=numbers))
            case "array":
                return self._write_list(schema, depth)
            case "object":
                return self.write_object(schema, depth)
            case _:
                return _WORD_EXPRESSIONS.get(name)

    def _write_list(self, schema: Mapping[str, Any], depth: int) -> str | None:
        if not has_only_keywords(schema, "type", "items", "minItems", "maxItems"):
            return None
        item = self.write_value(schema.get("items", True), depth + 1)
        minimum, maximum = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(minimum, int) or not isinstance(maximum, int | None) or item is None:
            return None
        if maximum == 0:
            return None if minimum else self.literal("[]")
        bound = "" if maximum is None else str(maximum - 1)
        more = f'("," {item}){{{max(minimum - 1, 0)},{bound}}}'
        return f'"[" {item} {more} "]"' if minimum else f'"[" ({item} {more})? "]"'


def _as_list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else [value]


def _join_alternatives(expressions: Iterable[str | None]) -> str | None:
    """Joins the alternatives that are not None."""
    alternatives = [expression for expression in expressions if expression is not None]
    return f"({' | '.join(alternatives)})" if alternatives else None
