"""Splits a model's output into text, reasoning and tool calls.

Knows: how white space around markers is handled, which is the same for all families. Must not
know: the markers of any family (`app/text/families`), tokens, events.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from app.grammar.constraint import ReasoningTags
from app.text.syntax.reader import Reader, Resumable, find_partial_mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A part of the content, exactly as generated. at: the position of its first character
    in the model's output."""

    text: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """A part of the reasoning, exactly as generated."""

    text: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallStart:
    """The start of a tool call. id: the call ID, or None if the syntax has no IDs."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallArguments:
    """The next part of the arguments of the last call, as JSON text."""

    text: str


OutputPart = Content | Reasoning | ToolCallStart | ToolCallArguments

_TextType = type[Content] | type[Reasoning]


class OutputBuilder:
    """Collects the parts found by a parser.

    White space next to a marker is treated as part of the marker: before the first content, after
    the last content, and at the start and end of reasoning. All other white space is preserved, so
    a call within the content does not join two words.

    Hidden markers are removed wherever they are. If one of them is a reasoning tag, the text
    between the tags is reasoning. Directly after another marker, reasoning tags are recognized even
    if they are not hidden.
    """

    def __init__(
        self,
        hidden: Iterable[str] = (),
        tags: ReasoningTags | None = None,
        *,
        calls_end_reasoning: bool = True,
    ) -> None:
        """hidden: markers that are never part of the text. tags: the reasoning tags of the model.
        calls_end_reasoning: see `ChatFamily.build_parser`."""
        self.calls_end_reasoning = calls_end_reasoning
        self._parts: list[OutputPart] = []
        self._hidden = frozenset(hidden)
        self._open = None if tags is None else tags.open.strip()
        self._close = None if tags is None else tags.close.strip()
        self._in_tags = False  # whether content is reasoning, because it is between tags
        self._partial: tuple[_TextType, str, int] | None = None  # text that may become a marker
        self._current_kind: _TextType | None = None
        self._after_marker = False  # whether the position is directly after a marker
        self._held_space: list[tuple[str, int]] = []  # consumed, but may be next to a marker
        self._space_between: list[tuple[str, int]] = []  # around markers that follow content
        self._has_content = False

    def fork(self) -> "OutputBuilder":
        """Returns an empty builder for the text that follows."""
        other = OutputBuilder(self._hidden, calls_end_reasoning=self.calls_end_reasoning)
        other._open, other._close = self._open, self._close
        return other

    def extend(self, other: "OutputBuilder", offset: int) -> None:
        """Adds the parts of a fork. offset: the position at which it began."""
        other.finish()
        self.add_marker()
        for part in other.drain():
            match part:
                case Content(text=text, at=at):
                    self.add_content(text, offset + at)
                case Reasoning(text=text, at=at):
                    self.add_reasoning(text, offset + at)
                case ToolCallStart(name=name, id=id):
                    self.start_tool_call(name, id)
                case ToolCallArguments(text=text):
                    self.add_arguments(text)

    def hides(self, text: str) -> bool:
        """Returns whether text is removed."""
        return text in self._hidden

    def hide(self, *markers: str) -> None:
        """Removes these markers from the following text."""
        self._hidden = self._hidden.union(markers)

    def add_content(self, text: str, at: int) -> None:
        self._filter(Content, text, at)

    def add_reasoning(self, text: str, at: int) -> None:
        self._filter(Reasoning, text, at)

    def add_marker(self) -> None:
        """Adds a marker at the start or end of reasoning, a call or another part of the output."""
        self._flush_partial()
        self._mark()

    def start_tool_call(self, name: str, id: str | None = None) -> None:
        self.add_marker()
        self._in_tags = False
        self._parts.append(ToolCallStart(name=name, id=id))

    def add_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCallArguments(text=text))

    def finish(self) -> None:
        """Ends the text. Trailing white space is not next to a marker."""
        self._flush_partial()
        self._flush_space()

    @property
    def held_position(self) -> int | None:
        """The position of the first character that is held back, or None."""
        if self._held_space:
            return self._held_space[0][1]
        return None if self._partial is None else self._partial[2]

    def drain(self) -> list[OutputPart]:
        """Returns the parts found since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def _filter(self, kind: _TextType, text: str, at: int) -> None:
        """Adds text without the hidden markers, and holds back an incomplete marker."""
        if self._partial is not None:
            before, held, begin = self._partial
            if before is kind and begin + len(held) == at:
                text, at = held + text, begin
                self._partial = None
            else:
                self._flush_partial()
        text, at = self._remove_markers(kind, text, at, ended=False)
        whole = find_partial_mark(text, self._find_active_markers(kind))
        self._add(kind, text[:whole], at)
        if whole < len(text):
            self._partial = kind, text[whole:], at + whole

    def _flush_partial(self) -> None:
        if self._partial is not None:
            kind, text, at = self._partial
            self._partial = None
            self._add(kind, *self._remove_markers(kind, text, at, ended=True))

    def _remove_markers(
        self, kind: _TextType, text: str, at: int, *, ended: bool
    ) -> tuple[str, int]:
        """Adds the text up to the last complete marker. Returns the rest and its position. ended:
        whether no text follows, so that a marker cannot be the start of a longer one."""
        while active := self._find_active_markers(kind):
            longest_first = sorted(active, key=len, reverse=True)
            match = re.search("|".join(map(re.escape, longest_first)), text)
            if match is None or not (ended or match.start() < find_partial_mark(text, active)):
                break
            mark, before = match[0], text[: match.start()]
            self._add(kind, before, at)
            at, text = at + match.end(), text[match.end() :]
            if mark not in self._hidden and mark == self._open and not self._after_marker:
                self._add(kind, mark, at - len(mark))
                continue
            self._mark()
            if kind is Content and mark in (self._open, self._close):
                self._in_tags = mark == self._open
        return text, at

    def _find_active_markers(self, kind: _TextType) -> frozenset[str]:
        active = self._hidden
        if kind is Content and self._open is not None and self._close is not None:
            if self._in_tags:
                return active | {self._close}
            if self._after_marker:
                return active | {self._open}
        return active

    def _mark(self) -> None:
        if self._current_kind is Content:
            self._space_between += self._held_space
        self._held_space.clear()
        self._after_marker = True

    def _add(self, kind: _TextType, text: str, at: int) -> None:
        if not text:
            return
        if kind is Content and self._in_tags:
            kind = Reasoning
        if kind is not self._current_kind:
            self._held_space.clear()
            self._current_kind = kind
        if self._after_marker:
            stripped = text.lstrip()
            space = text[: len(text) - len(stripped)]
            if space and kind is Content:
                self._space_between.append((space, at))
            at, text = at + len(space), stripped
            if not text:
                return
            self._after_marker = False
        stripped = text.rstrip()
        if stripped:
            self._flush_space()
            self._add_text(kind, stripped, at)
        if len(stripped) < len(text):
            self._held_space.append((text[len(stripped) :], at + len(stripped)))

    def _add_text(self, kind: _TextType, text: str, at: int) -> None:
        """Adds text that begins and ends without white space."""
        if kind is Content and self._has_content:
            self._parts += (Content(text=space, at=begin) for space, begin in self._space_between)
        self._space_between.clear()
        self._has_content = self._has_content or kind is Content
        self._parts.append(kind(text=text, at=at))

    def _flush_space(self) -> None:
        assert self._current_kind is not None or not self._held_space
        for text, at in self._held_space:
            self._parts.append((self._current_kind or Content)(text=text, at=at))
        self._held_space.clear()


Parse = Callable[[Reader, OutputBuilder], Resumable[None]]


class OutputParser:
    """Splits the model's output into parts, as a stage with `feed` and `flush`. The concatenated
    output does not depend on how the input was split."""

    def __init__(
        self,
        parse: Parse,
        *,
        hidden: Iterable[str] = (),
        tags: ReasoningTags | None = None,
        calls_end_reasoning: bool = True,
    ) -> None:
        """parse: a parser that accepts and consumes any text. The other parameters are the same as
        in `OutputBuilder`."""
        self._reader = Reader()
        self._output = OutputBuilder(hidden, tags, calls_end_reasoning=calls_end_reasoning)
        self._parser = parse(self._reader, self._output)
        self._finished = False
        self._resume()

    def feed(self, text: str) -> list[OutputPart]:
        if text:
            self._reader.push(text)
            self._resume()
        return self._output.drain()

    def flush(self) -> list[OutputPart]:
        """Ends the text. Returns the remaining parts."""
        self._reader.end()
        self._resume()
        assert self._finished, "a parser did not read to the end"
        self._output.finish()
        return self._output.drain()

    @property
    def settled(self) -> int:
        """The position up to which no text is held back."""
        waiting = self._output.held_position
        return self._reader.settled if waiting is None else min(waiting, self._reader.settled)

    def _resume(self) -> None:
        if self._finished:
            assert not self._reader.ahead, "a parser did not read to the end"
            return
        try:
            next(self._parser)
        except StopIteration:
            self._finished = True
            assert self._reader.ended, "a parser ended too early"
            assert not self._reader.ahead, "a parser left text"
