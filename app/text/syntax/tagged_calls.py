"""Tool calls in tags, with raw values (without quotes or escapes): the parser, the grammar, and the
base class of families.

    <tool_call><function=get_weather><parameter=city>Oslo</parameter></function></tool_call>

    before   begin       name end      key_begin  key  key_end
                                                  value_begin value value_end   …   end   after

Knows: the common structure of such syntaxes. Must not know: the tags of any of them.

Only the tool's schema distinguishes strings from numbers (`parameter_types.py`). Values are not
escaped, so a value may contain any tag, including its own closing tag. A tag therefore ends a value
only if it is followed by valid text.

In the grammar, a value that is not a string is JSON, and the JSON grammar enforces its schema. A
string is free text up to its closing tag, which cannot be combined with the regular expression of a
schema. If a schema constrains a string by more than an enumeration, the call is a JSON object
between the outer tags, because models that were trained on much JSON also write such calls.
Families whose outer tags enclose all calls have no grammar in this case.
"""

import json as jsons
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.family import THINK_TAGS, ChatFamily
from app.text.syntax.json_calls import build_call_expression, parse_calls, parse_json_arguments
from app.text.syntax.literal_reader import convert_literal_before, escape_json
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.parameter_types import (
    ANNOTATION_KEYWORDS,
    STRING_TYPE,
    JsonTypes,
    get_parameter_types,
    get_schema_types,
    may_be_non_string,
    resolve_reference,
    to_json,
)
from app.text.syntax.reader import OnText, Reader, Resumable

_OBJECT_KEYWORDS = ANNOTATION_KEYWORDS | {
    *("type", "properties", "required", "additionalProperties"),
    *("$defs", "definitions", "$schema", "$id"),
}
_NAME = re.compile(r"[^\s<>\"]+")
_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')

# the rule for free text, including the closing tag
_TEXT_RULE = "parameter"

NarrowTypes = Callable[[JsonTypes | None], JsonTypes | None]
"""Narrows the types of a schema to the types implied by a tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """The tags of a family.

    before, after: the tags around a call. grouped: whether `before` and `after` enclose all calls
    of an output instead. begin: the tag before the name, or "" if the name follows `before`. end:
    the tag after the arguments, or None if `after` ends the call. key_ends: the tags after a key,
    with the types that each tag implies. value_begin: the tag before a value, or "" if the value
    follows the tag after the key. values_on_own_lines: whether values are on separate lines. gap:
    the white space between tags. gap_optional: whether this white space may be missing.
    """

    before: str
    after: str
    begin: str
    name_end: str
    end: str | None
    key_begin: str
    key_ends: Mapping[str, NarrowTypes | None]
    value_begin: str = ""
    value_end: str
    grouped: bool = False
    values_on_own_lines: bool = False
    gap: str = "\n"
    gap_optional: bool = False

    @property
    def start_markers(self) -> tuple[str, ...]:
        """The markers that start calls."""
        return (self.before, self.begin) if self.begin else (self.before,)

    @property
    def end_markers(self) -> tuple[str, ...]:
        """The markers that end a call or all calls."""
        return (self.after,) if self.end is None else (self.end, self.after)

    @property
    def value_suffix(self) -> str:
        """The text after a value."""
        return f"\n{self.value_end}" if self.values_on_own_lines else self.value_end

    @property
    def value_ends(self) -> dict[str, tuple[str, ...]]:
        """The markers that end a value, each with the texts that may follow it. If the end tag of a
        value is missing, the value ends at the end tag of the call or of all calls."""
        ends = {self.value_end: (self.key_begin, *self.end_markers)}
        if self.end is not None:
            return {**ends, self.end: (self.after, *self.start_markers)}
        return {**ends, self.after: (self.before,)}


class TaggedCallParser:
    """Parses the calls of one output."""

    def __init__(self, tags: CallTags, tools: Sequence[Tool]) -> None:
        self._tags = tags
        self._schemas = {tool.name: tool.parameters for tool in tools}

    def parse(
        self, reader: Reader, output: OutputBuilder, mark: str, on_text: OnText
    ) -> Resumable[bool]:
        """Parses the text after a start marker, which was already consumed. Returns whether it was
        a call. If not, passes the marker to `on_text` and consumes nothing.

        Models sometimes omit the outer tag, so a call may start without it. Such a call must
        contain the name of a known tool, because nothing else identifies it as a call.
        """
        inside = reader.hold()
        if mark == self._tags.before:
            called = yield from self._parse_first(reader, output)
        else:
            name = yield from self._parse_name(reader)
            called = name in self._schemas
            if name is not None and called:
                yield from self._parse_call(reader, output, name)
        if not called:
            reader.rewind(inside)
            on_text(mark, inside - len(mark))
            return False
        yield from self._parse_rest(reader, output)
        output.add_marker()
        return True

    def _parse_first(self, reader: Reader, output: OutputBuilder) -> Resumable[bool]:
        """Parses the text after the outer tag. Returns whether it was a call."""
        yield from reader.skip_space()
        if (yield from reader.peek()) in ("{", "["):
            return (yield from self._parse_json_call(reader, output))
        if self._tags.begin and (yield from reader.accept(self._tags.begin)) is None:
            return False
        name = yield from self._parse_name(reader)
        if name is not None:
            yield from self._parse_call(reader, output, name)
        return name is not None

    def _parse_json_call(self, reader: Reader, output: OutputBuilder) -> Resumable[bool]:
        """Parses a call in JSON, which models sometimes write because they were trained on much
        JSON."""
        reader.call_ends = (self._tags.after,)
        outcome = yield from parse_calls(reader, output)
        if outcome == "none":
            return False
        reader.release()
        if outcome == "broken":
            yield from reader.read_before(
                self._tags.after, on_text=lambda text, _: output.add_arguments(text)
            )
        return True

    def _parse_rest(self, reader: Reader, output: OutputBuilder) -> Resumable[None]:
        """Parses further calls within the outer tag, and the end of the outer tag."""
        output.add_marker()
        while True:
            behind = reader.hold()
            yield from reader.skip_space()
            begin = self._tags.begin
            if not begin or (yield from reader.accept(begin)) is None:
                break
            inside = reader.hold()
            name = yield from self._parse_name(reader)
            if name is None:
                reader.rewind(inside)
                output.add_marker()
                output.add_content(begin, inside - len(begin))
                return
            yield from self._parse_call(reader, output, name)
        if (yield from reader.accept(self._tags.after)) is None and not _take_truncated(
            reader, *self._tags.start_markers[1:], self._tags.after
        ):
            reader.rewind(behind)
        reader.release()

    def _parse_name(self, reader: Reader) -> Resumable[str | None]:
        """Parses a function's name and its end marker. Returns None if there is none."""
        tags = self._tags
        if tags.begin:
            name, end = yield from reader.read_text_until(tags.name_end, "\n", "<")
            return name.strip() or None if end == tags.name_end else None
        pieces: list[str] = []
        end = yield from reader.read_before("\n", "<", on_text=lambda text, _: pieces.append(text))
        name = "".join(pieces).strip()
        # without a marker after the name, the following text must confirm the call
        if end is None or not name or len(name.split()) > 1:
            return None
        return name if (yield from _is_followed_by(reader, (tags.key_begin, tags.after))) else None

    def _parse_call(self, reader: Reader, output: OutputBuilder, name: str) -> Resumable[None]:
        """Parses a call's arguments, up to its end or to the end of the outer tag. The end of the
        outer tag is not consumed."""
        reader.release()
        output.start_tool_call(name)
        tags, schema = self._tags, self._schemas.get(name, {})
        missing = dict.fromkeys(schema.get("properties", ()))  # in the order of the schema
        before = "{"
        while True:
            yield from reader.skip_space()
            met = yield from reader.peek_any(tags.key_begin, *tags.end_markers)
            if (yield from reader.accept(tags.key_begin)) is None:
                break
            output.add_arguments(f'{before}"')
            before = ", "
            key, end = yield from reader.read_text_until(*tags.key_ends)
            output.add_arguments(escape_json(key))
            if end is None:
                return
            output.add_arguments('": ')
            types, narrow = get_parameter_types(schema, key), tags.key_ends[end]
            types = narrow(types) if narrow else types
            missing.pop(key, None)
            if not (yield from self._parse_value(reader, output, types, tuple(missing))):
                return
        if met is not None:
            output.add_arguments("{}" if before == "{" else "}")
        elif not _take_truncated(reader, tags.key_begin, *tags.end_markers):
            yield from parse_json_arguments(reader, output, *tags.end_markers)
        if self._tags.end is not None:
            yield from reader.accept(self._tags.end)

    def _parse_value(
        self,
        reader: Reader,
        output: OutputBuilder,
        types: JsonTypes | None,
        missing: Sequence[str],
    ) -> Resumable[bool]:
        """Parses a value and its end tag. If the end tag is missing, the value ends at the next
        parameter. missing: the names of the parameters that may follow. Returns False if the text
        ends before the value."""
        tags = self._tags
        if tags.value_begin:
            yield from reader.skip_space()
            yield from reader.accept(tags.value_begin)
        if tags.values_on_own_lines:
            yield from reader.accept("\n")
        first = yield from reader.peek()
        if types is not None and "string" not in types and first in ("{", "["):
            return (yield from self._parse_literal(reader, output))
        if may_be_non_string(first, types):
            return (yield from self._parse_unquoted(reader, output, types, missing))
        output.add_arguments('"')
        complete = yield from self._parse_raw(
            reader, lambda text: output.add_arguments(escape_json(text)), missing
        )
        if complete:
            output.add_arguments('"')
        return complete

    def _parse_literal(self, reader: Reader, output: OutputBuilder) -> Resumable[bool]:
        """Parses an object or a list. A tag within one of its strings is ignored."""
        tags = self._tags
        marks = _find_value_marks(tags)
        end = yield from convert_literal_before(reader, *marks, on_text=output.add_arguments)
        if tags.values_on_own_lines:
            yield from reader.accept("\n")
        yield from reader.accept(tags.value_end)
        return end is not None

    def _parse_unquoted(
        self,
        reader: Reader,
        output: OutputBuilder,
        types: JsonTypes | None,
        missing: Sequence[str],
    ) -> Resumable[bool]:
        """Parses a value whose type is known only at its end."""
        raw: list[str] = []
        complete = yield from self._parse_raw(reader, raw.append, missing)
        written = to_json("".join(raw), types)
        # a truncated string remains open
        output.add_arguments(written if complete else written.removesuffix('"'))
        return complete

    def _parse_raw(
        self, reader: Reader, on_text: Callable[[str], None], missing: Sequence[str]
    ) -> Resumable[bool]:
        """Reads a raw value and its end tag. Returns False if the text ends before the value."""
        ends = self._tags.value_ends
        keys = tuple(name + end for name in missing for end in self._tags.key_ends)
        marks = _find_value_marks(self._tags)
        while True:
            mark = yield from reader.read_before(*marks, on_text=lambda text, _: on_text(text))
            if mark is None:
                return False
            position = reader.hold()
            reader.take(len(mark))
            tag = mark.removeprefix("\n")
            if tag == self._tags.key_begin:
                is_end = keys and (yield from reader.peek_any(*keys)) is not None
            else:
                is_end = yield from _is_followed_by(reader, ends[tag])
            if is_end:
                # do not consume the end tag of an outer element
                own = tag == self._tags.value_end
                reader.rewind(position + len(mark) - (0 if own else len(tag)))
                return True
            reader.rewind(position + len(mark))
            on_text(mark)


def _find_value_marks(tags: CallTags) -> tuple[str, ...]:
    """Returns the tags at which a value may end, with and without the line break that belongs to
    them. A line break before the value's own end tag is part of the value, unless values are on
    their own lines."""
    marks = (*tags.value_ends, tags.key_begin)
    after_lines = marks if tags.values_on_own_lines else marks[1:]
    return (*marks, *(f"\n{mark}" for mark in after_lines))


def _is_followed_by(reader: Reader, marks: Sequence[str]) -> Resumable[bool]:
    """Returns whether one of the marks follows after optional white space, given the known text."""
    yield from reader.skip_space()
    if (yield from reader.peek_any(*marks)) is not None:
        return True
    return _ends_within_mark(reader, marks)


def _take_truncated(reader: Reader, *marks: str) -> bool:
    """Returns whether the text ends before or within one of the marks, and if so, consumes the
    rest. The caller has checked that no complete mark follows."""
    cut = _ends_within_mark(reader, marks)
    if cut:
        reader.take(len(reader.ahead))
    return cut


def _ends_within_mark(reader: Reader, marks: Iterable[str]) -> bool:
    return reader.ended and any(mark.startswith(reader.ahead) for mark in marks)


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
    """Escapes text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


class TaggedFamily(ChatFamily):
    """The base class of families with tool calls in tags."""

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
