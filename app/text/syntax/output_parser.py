"""Splits a model's output into text, reasoning and tool calls.

Knows: how white space around markers is handled, which is the same for all families. Must not
know: the markers of any family (`app/text/families`), tokens, events.
"""

from collections.abc import Callable
from dataclasses import dataclass

from app.text.syntax.reader import Reader, Resumable


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


class OutputBuilder:
    """Collects the parts found by a parser.

    White space next to a marker is treated as part of the marker: at the end of text before a call
    or reasoning, at the start and end of reasoning, and after a call or reasoning. All other white
    space is preserved.
    """

    def __init__(self) -> None:
        self._parts: list[OutputPart] = []
        self._current_kind: type[Content] | type[Reasoning] | None = None
        self._after_marker = False  # whether the position is directly after a marker
        self._held_space: list[tuple[str, int]] = []  # consumed, but may be next to a marker

    def add_content(self, text: str, at: int) -> None:
        self._add(Content, text, at)

    def add_reasoning(self, text: str, at: int) -> None:
        self._add(Reasoning, text, at)

    def add_marker(self) -> None:
        """Adds a marker at the start or end of reasoning, a call or another part of the output."""
        self._held_space.clear()
        self._after_marker = True

    def start_tool_call(self, name: str, id: str | None = None) -> None:
        self.add_marker()
        self._parts.append(ToolCallStart(name=name, id=id))

    def add_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCallArguments(text=text))

    def finish(self) -> None:
        """Ends the text. Trailing white space is not next to a marker."""
        self._flush_space()

    @property
    def held_position(self) -> int | None:
        """The position of the first whitespace character that is held back, or None."""
        return self._held_space[0][1] if self._held_space else None

    def drain(self) -> list[OutputPart]:
        """Returns the parts found since the last call."""
        found, self._parts = self._parts, []
        return found

    def _add(self, kind: type[Content] | type[Reasoning], text: str, at: int) -> None:
        if kind is not self._current_kind:
            self._held_space.clear()
            self._current_kind = kind
        if self._after_marker:
            at += len(text) - len(text.lstrip())
            text = text.lstrip()
            if not text:
                return
            self._after_marker = False
        stripped = text.rstrip()
        if stripped:
            self._flush_space()
            self._parts.append(kind(text=stripped, at=at))
        if len(stripped) < len(text):
            self._held_space.append((text[len(stripped) :], at + len(stripped)))

    def _flush_space(self) -> None:
        assert self._current_kind is not None or not self._held_space
        for text, at in self._held_space:
            self._parts.append((self._current_kind or Content)(text=text, at=at))
        self._held_space.clear()


Parse = Callable[[Reader, OutputBuilder], Resumable[None]]


class OutputParser:
    """Splits the model's output into parts, as a stage with `feed` and `flush`. The concatenated
    output does not depend on how the input was split."""

    def __init__(self, parse: Parse) -> None:
        """parse: a parser that accepts and consumes any text."""
        self._reader = Reader()
        self._output = OutputBuilder()
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
