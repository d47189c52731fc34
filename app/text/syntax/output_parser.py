"""What an answer is made of: text, reasoning, tool calls; and the stage that takes it apart.

Knows: how white space around markers is treated, which is the same everywhere. Must not know: any
family's markers (`app/text/families`), tokens, events.
"""

from collections.abc import Callable
from dataclasses import dataclass

from app.text.syntax.reader import Reader, Resumable


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A piece of the answer proper, exactly as the model wrote it. at: position of its first
    character in all that the model wrote."""

    text: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """A piece of reasoning, exactly as the model wrote it."""

    text: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallStart:
    """A tool call begins. id: where the syntax brings one."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallArguments:
    """The next piece of the JSON text of the last call's arguments."""

    text: str


OutputPart = Content | Reasoning | ToolCallStart | ToolCallArguments


class OutputBuilder:
    """Where a parser puts what it has understood.

    White space beside a marker belongs to the marker: what ends a text before a call or before
    reasoning, what begins or ends reasoning, and what follows either. White space that turns out to
    stand beside no marker is kept, every character of it.
    """

    def __init__(self) -> None:
        self._parts: list[OutputPart] = []
        self._current_kind: type[Content] | type[Reasoning] | None = None
        self._after_marker = False  # right behind a marker
        self._held_space: list[tuple[str, int]] = []  # seen, and perhaps beside a marker

    def add_content(self, text: str, at: int) -> None:
        self._add(Content, text, at)

    def add_reasoning(self, text: str, at: int) -> None:
        self._add(Reasoning, text, at)

    def add_marker(self) -> None:
        """A marker stands here: one that begins or ends reasoning, a call, a part of the answer."""
        self._held_space.clear()
        self._after_marker = True

    def start_tool_call(self, name: str, id: str | None = None) -> None:
        self.add_marker()
        self._parts.append(ToolCallStart(name=name, id=id))

    def add_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCallArguments(text=text))

    def finish(self) -> None:
        """The text is over, and no marker stands at its end."""
        self._flush_space()

    @property
    def held_position(self) -> int | None:
        """Position of the first white space that is held back."""
        return self._held_space[0][1] if self._held_space else None

    def drain(self) -> list[OutputPart]:
        """What was found since the last time."""
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
        solid = text.rstrip()
        if solid:
            self._flush_space()
            self._parts.append(kind(text=solid, at=at))
        if len(solid) < len(text):
            self._held_space.append((text[len(solid) :], at + len(solid)))

    def _flush_space(self) -> None:
        assert self._current_kind is not None or not self._held_space
        for text, at in self._held_space:
            self._parts.append((self._current_kind or Content)(text=text, at=at))
        self._held_space.clear()


Parse = Callable[[Reader, OutputBuilder], Resumable[None]]


class OutputParser:
    """An answer's text → its pieces. A stage: `feed` and `flush`; what it gives out, joined, does
    not depend on how the text was cut."""

    def __init__(self, parse: Parse) -> None:
        """parse: reads to the end of the text, whatever the text is."""
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
        """The rest, now that no text will come."""
        self._reader.end()
        self._resume()
        assert self._finished, "a parser did not read to the end"
        self._output.finish()
        return self._output.drain()

    @property
    def settled(self) -> int:
        """Position before which nothing is held back."""
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
