"""Tool calls between tags, with values that stand there as they are: no quotes, no escapes.

    <tool_call><function=get_weather><parameter=city>Oslo</parameter></function></tool_call>

    before   begin       name end      key_begin  key  key_end
                                                  value_begin value value_end   …   end   after

What is a string and what a number only the tool's schema knows (`parameter_types.py`). And since
nothing is escaped, a value may hold any tag, its own closing one too: that ends a value only where
something stands behind it that can.

Knows: what such syntaxes have in common. Must not know: how one of them spells its tags.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.core.requests import Tool
from app.text.syntax.call_object import call_object
from app.text.syntax.json_arguments import json_arguments
from app.text.syntax.literal_reader import literal_before, quoted
from app.text.syntax.parameter_types import Types, may_be_other, to_json, types_of
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

Narrow = Callable[[Types | None], Types | None]
"""What the schema says of a value → what it is together with what a tag says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """How a family spells it.

    before, after: around a call; grouped: around all calls of an answer. begin: "" where the name
    follows `before`. end: None where `after` ends the call. key_ends: with what each says of the
    value's type. value_begin: "" where the value follows the key's end. lines: a value stands on
    lines of its own. gap, loose: what stands between tags, and whether it may be missing.
    """

    before: str
    after: str
    begin: str
    name_end: str
    end: str | None
    key_begin: str
    key_ends: Mapping[str, Narrow | None]
    value_begin: str = ""
    value_end: str
    grouped: bool = False
    lines: bool = False
    gap: str = "\n"
    loose: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """What begins calls."""
        return (self.before, self.begin) if self.begin else (self.before,)

    @property
    def closing(self) -> tuple[str, ...]:
        """What ends a call, or all of them."""
        return (self.after,) if self.end is None else (self.end, self.after)

    @property
    def value_close(self) -> str:
        """What stands behind a value."""
        return f"\n{self.value_end}" if self.lines else self.value_end

    @property
    def value_ends(self) -> dict[str, tuple[str, ...]]:
        """What ends a value → what may stand behind it. Where a value's own tag is missing it is a
        call's, or that of all of them."""
        ends = {self.value_end: (self.key_begin, *self.closing)}
        if self.end is not None:
            return {**ends, self.end: (self.after, *self.marks)}
        return {**ends, self.after: (self.before,)}


class TaggedCalls:
    """Reads the calls of one answer."""

    def __init__(self, tags: CallTags, tools: Sequence[Tool]) -> None:
        self._tags = tags
        self._schemas = {tool.name: tool.parameters for tool in tools}

    @property
    def marks(self) -> tuple[str, ...]:
        """What a text is to be read up to, for `read` to go on."""
        return self._tags.marks if self._schemas else ()

    def read(self, reader: Reader, pieces: Pieces, mark: str) -> Wait[None]:
        """What follows one of the marks, which was taken: calls, or it was none and is text.

        Models forget the outer tag, so a call may begin without; but then it must be one of the
        tools', for the text did not say that a call comes."""
        inside = reader.hold()
        if mark == self._tags.before:
            called = yield from self._first(reader, pieces)
        else:
            name = yield from self._name(reader)
            called = name in self._schemas
            if name is not None and called:
                yield from self._call(reader, pieces, name)
        if not called:
            reader.rewind(inside)
            pieces.say(mark, inside - len(mark))
            return
        yield from self._others(reader, pieces)
        pieces.mark()

    def _first(self, reader: Reader, pieces: Pieces) -> Wait[bool]:
        """What follows the outer tag. Whether it was a call."""
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            return (yield from self._object(reader, pieces))
        if self._tags.begin and (yield from reader.accept(self._tags.begin)) is None:
            return False
        name = yield from self._name(reader)
        if name is not None:
            yield from self._call(reader, pieces, name)
        return name is not None

    def _object(self, reader: Reader, pieces: Pieces) -> Wait[bool]:
        """A call in JSON, which models write that have seen much of it."""
        outcome = yield from call_object(reader, pieces)
        if outcome == "none":
            return False
        reader.release()
        if outcome == "broken":
            yield from reader.before(self._tags.after, take=lambda text, _: pieces.arguments(text))
        return True

    def _others(self, reader: Reader, pieces: Pieces) -> Wait[None]:
        """What may follow a call within the outer tag, and that tag's end."""
        while True:
            yield from reader.space()
            begin = self._tags.begin
            if not begin or (yield from reader.accept(begin)) is None:
                break
            inside = reader.hold()
            name = yield from self._name(reader)
            if name is None:
                reader.rewind(inside)
                pieces.mark()
                pieces.say(begin, inside - len(begin))
                return
            yield from self._call(reader, pieces, name)
        if (yield from reader.accept(self._tags.after)) is None:
            _cut(reader, *self._tags.marks[1:], self._tags.after)

    def _name(self, reader: Reader) -> Wait[str | None]:
        """A function's name, and what ends it; None if there is none."""
        tags = self._tags
        if tags.begin:
            name, end = yield from reader.text_until(tags.name_end, "\n", "<")
            return name.strip() or None if end == tags.name_end else None
        pieces: list[str] = []
        end = yield from reader.before("\n", "<", take=lambda text, _: pieces.append(text))
        name = "".join(pieces).strip()
        # where nothing marks the name, what follows must show that it was one
        if end is None or not name or len(name.split()) > 1:
            return None
        return name if (yield from _goes_on(reader, (tags.key_begin, tags.after))) else None

    def _call(self, reader: Reader, pieces: Pieces, name: str) -> Wait[None]:
        """A call's arguments, to its end or to that of the outer tag, which is not taken."""
        reader.release()
        pieces.call(name)
        tags, schema = self._tags, self._schemas.get(name, {})
        before = "{"
        while True:
            yield from reader.space()
            met = yield from reader.meets(tags.key_begin, *tags.closing)
            if (yield from reader.accept(tags.key_begin)) is None:
                break
            pieces.arguments(f'{before}"')
            before = ", "
            key, end = yield from reader.text_until(*tags.key_ends)
            pieces.arguments(quoted(key))
            if end is None:
                return
            pieces.arguments('": ')
            types, narrow = types_of(schema, key), tags.key_ends[end]
            if not (yield from self._value(reader, pieces, narrow(types) if narrow else types)):
                return
        if met is not None:
            pieces.arguments("{}" if before == "{" else "}")
        elif not _cut(reader, tags.key_begin, *tags.closing):
            yield from json_arguments(reader, pieces, *tags.closing)
        if self._tags.end is not None:
            yield from reader.accept(self._tags.end)

    def _value(self, reader: Reader, pieces: Pieces, types: Types | None) -> Wait[bool]:
        """A value and its end. Whether there was one, else the text has ended."""
        tags = self._tags
        if tags.value_begin:
            yield from reader.space()
            yield from reader.accept(tags.value_begin)
        if tags.lines:
            yield from reader.accept("\n")
        first = yield from reader.peek()
        if types is not None and "string" not in types and first in ("{", "["):
            return (yield from self._literal(reader, pieces))
        if may_be_other(first, types):
            return (yield from self._unquoted(reader, pieces, types))
        pieces.arguments('"')
        whole = yield from self._raw(reader, lambda text: pieces.arguments(quoted(text)))
        if whole:
            pieces.arguments('"')
        return whole

    def _literal(self, reader: Reader, pieces: Pieces) -> Wait[bool]:
        """An object or a list. A tag within one of its strings ends nothing."""
        tags = self._tags
        marks = (*tags.value_ends, *_lines(tags))
        end = yield from literal_before(reader, *marks, take=pieces.arguments)
        if tags.lines:
            yield from reader.accept("\n")
        yield from reader.accept(tags.value_end)
        return end is not None

    def _unquoted(self, reader: Reader, pieces: Pieces, types: Types | None) -> Wait[bool]:
        """A value of which only its end will tell what it is."""
        raw: list[str] = []
        whole = yield from self._raw(reader, raw.append)
        written = to_json("".join(raw), types)
        # a string that was cut stays open
        pieces.arguments(written if whole else written.removesuffix('"'))
        return whole

    def _raw(self, reader: Reader, take: Callable[[str], None]) -> Wait[bool]:
        """A value as it is written, and its end. Whether there was one."""
        ends = self._tags.value_ends
        marks = (*ends, *_lines(self._tags))
        while True:
            mark = yield from reader.before(*marks, take=lambda text, _: take(text))
            if mark is None:
                return False
            held = reader.hold()
            reader.take(len(mark))
            tag = mark.removeprefix("\n")
            if (yield from _goes_on(reader, ends[tag])):
                # the end of something else is there to be read again
                own = tag == self._tags.value_end
                reader.rewind(held + len(mark) - (0 if own else len(tag)))
                return True
            reader.rewind(held + len(mark))
            take(mark)


def _lines(tags: CallTags) -> Iterable[str]:
    """The ends of values with the line end before them."""
    return (f"\n{end}" for end in tags.value_ends) if tags.lines else ()


def _goes_on(reader: Reader, marks: Sequence[str]) -> Wait[bool]:
    """Whether behind white space one of these follows, as far as the text goes."""
    yield from reader.space()
    if (yield from reader.meets(*marks)) is not None:
        return True
    return _ends_within(reader, marks)


def _cut(reader: Reader, *marks: str) -> bool:
    """Whether the text ends within one of these, or before it; then what there is of it is taken.
    None must be met."""
    cut = _ends_within(reader, marks)
    if cut:
        reader.take(len(reader.ahead))
    return cut


def _ends_within(reader: Reader, marks: Iterable[str]) -> bool:
    return reader.ended and any(mark.startswith(reader.ahead) for mark in marks)
