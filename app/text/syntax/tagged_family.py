"""The base class of families with tool calls in tags (`app/text/syntax/tagged_calls.py`).

Knows: how to build a parser and a grammar from tags. Must not know: the tags of any family.

In the grammar, a value that is not a string is JSON, and the JSON grammar enforces its schema. A
string is free text up to its closing tag, which cannot be combined with the regular expression of a
schema. If a schema constrains a string by more than an enumeration, the call is a JSON object
between the outer tags, because models that were trained on much JSON also write such calls.
Families whose outer tags enclose all calls have no grammar in this case.
"""

import json as jsons
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.family import THINK_TAGS, ChatFamily
from app.text.syntax.json_calls import build_call_expression
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.parameter_types import (
    ANNOTATION_KEYWORDS,
    STRING_TYPE,
    JsonTypes,
    get_schema_types,
    resolve_reference,
)
from app.text.syntax.reader import OnText, Reader, Resumable
from app.text.syntax.tagged_calls import CallTags, TaggedCallParser

_OBJECT_KEYWORDS = ANNOTATION_KEYWORDS | {
    *("type", "properties", "required", "additionalProperties"),
    *("$defs", "definitions", "$schema", "$id"),
}
_NAME = re.compile(r"[^\s<>\"]+")
_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')

# the rule for free text, including the closing tag
_TEXT_RULE = "parameter"


def build_tagged_grammar(
    tags: CallTags, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
) -> ToolCallGrammar | None:
    writer = _GrammarWriter(tags, literal, json_schema)
    calls = [writer.write_call(tool) for tool in tools]
    if tags.grouped and any(call is None for call in calls):
        return None
    syntax = ToolCallGrammar(
        calls=tuple(
            call or writer.write_json_call(tool) for tool, call in zip(tools, calls, strict=True)
        ),
        between=writer.gap_expression,
        trigger=tags.before,
        rules=writer.write_rules(),
    )
    if not tags.grouped:
        return syntax
    return replace(
        syntax,
        before=literal(f"{tags.before}{tags.gap}"),
        # use two lexemes, because the same gap separates calls
        after=f"{literal(tags.gap)} {literal(tags.after)}",
    )


class _GrammarWriter:
    def __init__(self, tags: CallTags, literal: MakeLiteral, json_schema: MakeJsonSchema) -> None:
        self._tags = tags
        self._literal = literal
        self._json_schema = json_schema
        self.gap_expression = f"({literal(tags.gap)})?" if tags.gap_optional else literal(tags.gap)
        self._has_text = False

    def write_call(self, tool: Tool) -> str | None:
        """Returns the expression for a call of this tool, or None if the syntax cannot enforce its
        schema."""
        properties = _read_properties(tool.parameters)
        if properties is None or not _NAME.fullmatch(tool.name):
            return None
        parts = [self._write_prefix(tool.name)]
        for name, schema in properties.items():
            value = self._write_value(tool, schema)
            if value is None or not _NAME.fullmatch(name):
                return None
            parameter = f"{self._write_key(name, schema, tool)} {value} {self.gap_expression}"
            required = name in tool.parameters.get("required", ())
            parts.append(parameter if required else f"({parameter})?")
        return " ".join((*parts, self._write_suffix()))

    def write_json_call(self, tool: Tool) -> str:
        """Returns the expression for a call of this tool in JSON."""
        tags = self._tags
        before, after = f"{tags.before}{tags.gap}", f"{tags.gap}{tags.after}"
        return build_call_expression(
            tool, self._literal, self._json_schema, before=before, after=after
        )

    def write_rules(self) -> str:
        """Returns the rules that calls refer to."""
        if not self._has_text:
            return ""
        tags = self._tags
        ends = "|".join(map(_escape_regex, tags.value_ends))
        free = f"~/(?s:.*)({ends})(?s:.*)/"
        close = self._literal(self._tags.value_suffix)
        literal = _LITERAL.match(close)
        if literal is None:  # a token, which plain text cannot contain
            return f"{_TEXT_RULE}: PARAMETER? {close}\nPARAMETER: /(?s:.+)/ & {free}"
        # use one lexeme, because otherwise free text would also match the following text
        rest = close[literal.end() :]
        return f"{_TEXT_RULE}: PARAMETER {rest}\nPARAMETER: (/(?s:.*)/ & {free}) {literal[0]}"

    def _write_prefix(self, name: str) -> str:
        tags = self._tags
        before = "" if tags.grouped else tags.before
        if not tags.begin:
            return f"{self._literal(before + name)} {self.gap_expression}"
        line = "" if tags.grouped else tags.gap
        return self._literal(f"{before}{line}{tags.begin}{name}{tags.name_end}{tags.gap}")

    def _write_suffix(self) -> str:
        tags = self._tags
        if tags.end is None:
            return self._literal(tags.after)
        return self._literal(tags.end if tags.grouped else f"{tags.end}{tags.gap}{tags.after}")

    def _write_key(self, name: str, schema: Any, tool: Tool) -> str:
        tags = self._tags
        key = self._literal(f"{tags.key_begin}{name}{self._select_key_end(schema, tool)}")
        line = "\n" if tags.values_on_own_lines else ""
        if not tags.value_begin:
            return f"{key} {self._literal(line)}" if line else key
        return f"{key} {self.gap_expression} {self._literal(tags.value_begin + line)}"

    def _select_key_end(self, schema: Any, tool: Tool) -> str:
        """Selects the tag after a key that implies the type in the schema."""
        types = get_schema_types(schema, tool.parameters)
        for end, narrow in self._tags.key_ends.items():
            is_text = types is None or "string" in types
            if narrow is None or is_text == (narrow(None) == STRING_TYPE):
                return end
        raise AssertionError(self._tags.key_ends)

    def _write_value(self, tool: Tool, schema: Any) -> str | None:
        """Returns the expression for a value and its end tag, or None if its schema cannot be
        enforced."""
        root, close = tool.parameters, self._literal(self._tags.value_suffix)
        types = get_schema_types(schema, root)
        schema = resolve_reference(schema, root)
        if types is not None and "string" not in types:
            document = _extract_schema(schema, types, root)
            if document is None:
                return None
            return f"{self._json_schema(replace(tool, parameters=document))} {close}"
        if _constrains_only_type(schema):
            self._has_text = True
            return _TEXT_RULE
        options = _read_enum_strings(schema) if types == STRING_TYPE else ()
        if not options or any(self._ends_early(option) for option in options):
            return None
        return f"({' | '.join(map(self._literal, options))}) {close}"

    def _ends_early(self, text: str) -> bool:
        return not text or text != text.strip() or any(e in text for e in self._tags.value_ends)


def _read_properties(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the parameters, or None if the schema has other constraints."""
    properties = schema.get("properties", {})
    plain = schema.keys() <= _OBJECT_KEYWORDS and schema.get("type", "object") == "object"
    if not plain or not isinstance(properties, Mapping):
        return None
    declared = cast(Mapping[str, Any], properties)
    return declared if set(schema.get("required", ())) <= declared.keys() else None


def _extract_schema(
    schema: Any, types: JsonTypes, root: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns a parameter's schema as a separate document. Returns None if the schema has
    references to anything but its definitions."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    document = {"type": sorted(types), **cast(Mapping[str, Any], schema)}
    if _REFERENCE.search(jsons.dumps([document, shared])):
        return None
    return {**shared, **document} if '"$ref"' in jsons.dumps(document) else document


def _constrains_only_type(schema: Any) -> bool:
    """Returns whether a schema only constrains the type of a value."""
    if schema is True:
        return True
    if not isinstance(schema, Mapping):
        return False
    schema = cast(Mapping[str, Any], schema)
    parts = schema.get("anyOf", ())
    return schema.keys() <= ANNOTATION_KEYWORDS | {"type", "nullable", "anyOf"} and all(
        map(_constrains_only_type, parts)
    )


def _read_enum_strings(schema: Any) -> Sequence[str]:
    """Returns the strings in a schema's enumeration, if any."""
    if not isinstance(schema, Mapping):
        return ()
    schema = cast(Mapping[str, Any], schema)
    if not schema.keys() <= ANNOTATION_KEYWORDS | {"type", "enum"}:
        return ()
    return cast(Sequence[str], schema.get("enum", ()))


def _escape_regex(text: str) -> str:
    """Escapes a text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


class TaggedFamily(ChatFamily):
    def __init__(
        self,
        tags: CallTags,
        *,
        template_marks: Sequence[str],
        markers: Sequence[str] = (),
        reasoning: ReasoningTags | None = None,
    ) -> None:
        """markers: the parts of the syntax that may be special tokens.
        reasoning: the tags of reasoning if they are not `<think>` and `</think>`."""
        self.call_tags = tags
        self.call_markers = tags.start_markers
        self.template_marks = tuple(template_marks)
        self._reasoning = reasoning or THINK_TAGS
        self.markers = (*markers, self._reasoning.open, self._reasoning.close)

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        tags = self._reasoning
        return tags if tags.close in template else super().reasoning_tags(template)

    def parse_call(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        mark: str,
        on_text: OnText,
    ) -> Resumable[bool]:
        called = yield from TaggedCallParser(self.call_tags, tools).parse(
            reader, output, mark, on_text
        )
        if called and self.call_tags.after in self.markers:
            output.hide(self.call_tags.after)  # it may come too late
        return called

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return build_tagged_grammar(self.call_tags, tools, literal, json_schema)
