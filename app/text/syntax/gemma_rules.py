"""What holds Gemma's notation of calls to a tool's schema, as Lark rules.

Knows: which of JSON Schema's keywords can be followed in that notation. Must not know: which token
quotes strings.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from app.core.requests import Tool
from app.text.family import CallSyntax, Json, Spell
from app.text.syntax.gemma_calls import is_key
from app.text.syntax.keyword_rules import keyword_rules, only
from app.text.syntax.parameter_types import resolved

_DEEPEST = 64  # objects and lists within each other
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_WORDS = {"boolean": '("true" | "false")', "null": '"null"'}
_NUMBERS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "type",
)


def gemma_syntax(
    tools: Sequence[Tool], spell: Spell, json_of: Json, *, open: str, close: str, quote: str
) -> CallSyntax | None:
    """As `ChatFamily.syntax`. open, close: around a call. None where a schema asks for what this
    notation cannot promise: a form or a length of strings, say."""
    calls: list[str] = []
    rules = [*_free_values(spell, quote)]
    for place, tool in enumerate(tools):
        schema = _Schema(tool, spell, json_of, quote, prefix=f"tool{place}")
        arguments = schema.object(dict(tool.parameters), deep=0)
        if arguments is None or not schema.whole or not is_key(tool.name):
            return None
        calls.append(f"{spell(f'{open}call:{tool.name}')} {arguments} {spell(close)}")
        rules += schema.rules
    return CallSyntax(calls=tuple(calls), between="", trigger=open, rules="\n".join(rules))


def _free_values(spell: Spell, quote: str) -> Iterable[str]:
    """Rules of strings, and of values of which nothing is known."""
    spelled = spell(quote)
    if spelled.startswith("<["):
        # no text spells a token
        yield f"gemmatext: {spelled} /(?s:.*)/ {spelled}"
    else:
        # one terminal, for a terminal is as long as it can be: text alone would swallow the quote
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
class _Schema:
    """Expressions of the values of one tool's arguments. Each None where there can be none.

    rules: those that the expressions name. references: the names of those that stand for
    definitions. whole: every definition has an expression.
    """

    tool: Tool
    spell: Spell
    json_of: Json
    quote: str
    prefix: str
    rules: list[str] = field(default_factory=list[str])
    references: dict[str, str] = field(default_factory=dict[str, str])
    whole: bool = True
    count: int = 0

    def value(self, schema: Any, deep: int) -> str | None:
        if schema is True or schema == {}:
            return "gemmaany"
        if not isinstance(schema, Mapping) or deep > _DEEPEST:
            return None
        schema = cast(Mapping[str, Any], schema)
        if "$ref" in schema:
            return self._reference(schema, deep)
        for keyword in ("enum", "const", "anyOf"):
            if keyword in schema:
                return self._choice(schema, keyword, deep)
        if "type" not in schema and not only(schema):
            return None
        types = _listed(schema.get("type", list(_TYPES)))
        return _either(self._typed(name, {**schema, "type": name}, deep) for name in types)

    def _reference(self, schema: Mapping[str, Any], deep: int) -> str | None:
        """A rule for each definition, since one may lead to itself."""
        target = resolved(schema, self.tool.parameters)
        if not only(schema, "$ref") or "$ref" in target:
            return None
        name = self.references.get(schema["$ref"])
        if name is None:
            name = f"{self.prefix}ref{len(self.references)}"
            self.references[schema["$ref"]] = name
            value = self.value(target, deep + 1)
            self.whole = self.whole and value is not None
            self.rules.append(f"{name}: {value}")
        return name

    def object(self, schema: Mapping[str, Any], deep: int) -> str | None:
        if "properties" not in schema and only(schema, "type"):
            return "gemmaobject"
        self.count += 1

        def pair(name: str, inner: Any) -> str | None:
            value = self.value(inner, deep + 1)
            return f"{self.spell(f'{name}:')} {value}" if value and is_key(name) else None

        prefix = f"{self.prefix}n{self.count}x"
        rules = keyword_rules(schema, prefix, between=self.spell(","), pair=pair)
        if rules is None:
            return None
        self.rules += rules.rules
        return " ".join((self.spell("{"), rules.expression, self.spell("}")))

    def _choice(self, schema: Mapping[str, Any], keyword: str, deep: int) -> str | None:
        if keyword == "anyOf":
            # what is said beside it would have to hold as well
            parts = _listed(schema["anyOf"]) if only(schema, "anyOf") else []
            return _either(self.value(part, deep + 1) for part in parts)
        if not only(schema, keyword, "type"):
            return None
        values = _listed(schema["enum"]) if keyword == "enum" else [schema["const"]]
        return _either(map(self._literal, values))

    def _literal(self, value: Any) -> str | None:
        if isinstance(value, str):
            return None if self.quote in value else self.spell(f"{self.quote}{value}{self.quote}")
        if isinstance(value, list | dict):
            return None
        return self.spell(json.dumps(value))

    def _typed(self, name: str, schema: Mapping[str, Any], deep: int) -> str | None:
        match name:
            case "string":
                return "gemmatext" if only(schema, "type") else None
            case "number" | "integer":
                numbers = {key: schema[key] for key in _NUMBERS if key in schema}
                return self.json_of(replace(self.tool, parameters=numbers))
            case "array":
                return self._list(schema, deep)
            case "object":
                return self.object(schema, deep)
            case _:
                return _WORDS.get(name)

    def _list(self, schema: Mapping[str, Any], deep: int) -> str | None:
        if not only(schema, "type", "items", "minItems", "maxItems"):
            return None
        item = self.value(schema.get("items", True), deep + 1)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not isinstance(most, int | None) or item is None:
            return None
        if most == 0:
            return None if least else self.spell("[]")
        bound = "" if most is None else str(most - 1)
        more = f'("," {item}){{{max(least - 1, 0)},{bound}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'


def _listed(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else [value]


def _either(expressions: Iterable[str | None]) -> str | None:
    """Those of several that there are."""
    found = [expression for expression in expressions if expression is not None]
    return f"({' | '.join(found)})" if found else None
