"""An incremental parser of Gemma's tool calls, `call:get_weather{city:<|"|>Oslo<|"|>,days:3}`, and
their grammar for a tool's schema, as Lark rules.

Knows: this notation, the types of values in a schema, the JSON Schema keywords that the notation
supports. Must not know: the token that quotes strings, the markers around calls.

Keys are not quoted. Strings are enclosed in quote tokens and have no escapes, so a string can
contain any text except the quote token. Models sometimes omit the quote token. The type of an
unquoted value is determined by the tool's schema.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.argument_grammar import build_argument_grammar, has_only_keywords
from app.text.syntax.json_calls import CallOutcome
from app.text.syntax.json_reader import parse_json_value
from app.text.syntax.literal_reader import escape_json
from app.text.syntax.nested_values import KeyPath, Notation, WriteJson, parse_nested_pairs
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.parameter_types import (
    JsonTypes,
    get_parameter_types,
    resolve_reference,
    to_json,
)
from app.text.syntax.reader import Reader, Resumable

_CALL = "call:"
_NAME = re.compile(r"[^\s{}<]{1,256}")
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_VALUE_ENDS = (",", "}", "]")  # these characters end an unquoted value

_MAX_DEPTH = 64  # maximum depth of nested objects and lists
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_WORD_EXPRESSIONS = {"boolean": '("true" | "false")', "null": '"null"'}
_NUMBER_KEYWORDS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "type",
)


def is_key(name: str) -> bool:
    """Returns whether a name can be a key without quotes."""
    return _KEY.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCallParser:
    """Parses the calls of one output. quote: the token around strings. close: the token after the
    calls. Within a call, `close` may occur only in a string."""

    quote: str
    close: str
    tools: Sequence[Tool]

    def parse(self, reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
        """Parses one call, and any calls immediately after it. Returns the same values as
        `parse_call_object`."""
        outcome = yield from self._parse_call(reader, output)
        while outcome == "complete":
            behind = reader.hold()
            outcome = yield from self._parse_call(reader, output)
            if outcome == "none":
                reader.rewind(behind)
                return "complete"
        return outcome

    def _parse_call(self, reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
        yield from reader.skip_space()
        if (yield from reader.accept(_CALL)) is None:
            return "none"
        name = yield from reader.match(_NAME)
        reader.take(len(name))
        if not name or (yield from reader.accept("{")) is None:
            return "none"
        output.start_tool_call(name)
        reader.release()
        output.add_arguments("{")
        notation = Notation(
            list_brackets={"[": "]"},
            parse_key=self._parse_key,
            parse_scalar=_ValueParser(self, name).parse,
        )
        complete = yield from parse_nested_pairs(notation, reader, output.add_arguments)
        return "complete" if complete else "broken"

    def _parse_key(self, reader: Reader) -> Resumable[str | None]:
        mark = reader.hold()
        if (yield from reader.accept(self.quote)) is not None:
            name, end = yield from reader.read_text_until(self.quote)
            yield from reader.skip_space()
            colon = (yield from reader.accept(":")) is not None
        else:
            name, end = yield from reader.read_text_until(
                ":", "{", "[", *_VALUE_ENDS, self.quote, self.close
            )
            colon = end == ":"
        if end is None or not colon:
            reader.rewind(mark)
            return None
        reader.release()
        return json.dumps(name.strip(), ensure_ascii=False)

    def parse_string(self, reader: Reader, write: WriteJson) -> Resumable[bool]:
        """Parses the rest of a string after its opening quote."""
        write('"')
        end = yield from reader.read_until(
            self.quote, on_text=lambda text, _: write(escape_json(text))
        )
        if end is not None:
            write('"')
        return end is not None


@dataclass(frozen=True, slots=True)
class _ValueParser:
    """Parses the values of one call."""

    parser: GemmaCallParser
    name: str

    def parse(self, reader: Reader, write: WriteJson, path: KeyPath) -> Resumable[bool]:
        if (yield from reader.accept(self.parser.quote)) is not None:
            return (yield from self.parser.parse_string(reader, write))
        if (yield from reader.peek()) == '"':
            return (yield from parse_json_value(reader, lambda text, _: write(text))) == "complete"
        mark = reader.hold()
        raw: list[str] = []
        quote, close = self.parser.quote, self.parser.close
        end = yield from reader.read_before(
            *_VALUE_ENDS, quote, close, on_text=lambda text, _: raw.append(text)
        )
        text = "".join(raw)
        if not text.strip() or end in (None, quote):
            # the value is truncated or invalid, so output it unchanged
            reader.rewind(mark)
            return False
        reader.release()
        write(to_json(text.strip(), self._get_types(path)))
        return True

    def _get_types(self, path: KeyPath) -> JsonTypes | None:
        """Returns the types that the schema allows for the parameter at `path`. Returns None for
        nested values, because their syntax determines their type."""
        [name, *within] = path
        tool = next((tool for tool in self.parser.tools if tool.name == self.name), None)
        return (
            None
            if tool is None or name is None or within
            else get_parameter_types(tool.parameters, name)
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
