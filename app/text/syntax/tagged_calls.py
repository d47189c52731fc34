"""Parses tool calls in tags, with raw values (without quotes or escapes).

    <tool_call><function=get_weather><parameter=city>Oslo</parameter></function></tool_call>

    before   begin       name end      key_begin  key  key_end
                                                  value_begin value value_end   …   end   after

Knows: the common structure of such syntaxes. Must not know: the tags of any of them.

Only the tool's schema distinguishes strings from numbers (`parameter_types.py`). Values are not
escaped, so a value may contain any tag, including its own closing tag. A tag therefore ends a value
only if it is followed by valid text.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.core.requests import Tool
from app.text.syntax.json_calls import parse_calls, parse_json_arguments
from app.text.syntax.literal_reader import convert_literal_before, escape_json
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.parameter_types import (
    JsonTypes,
    get_parameter_types,
    may_be_non_string,
    to_json,
)
from app.text.syntax.reader import OnText, Reader, Resumable

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
