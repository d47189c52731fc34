"""What an answer is made of: text, reasoning, tool calls; and the stage that takes it apart.

Knows: how white space around markers is treated, which is the same everywhere. Must not know: any
family's markers (`app/text/families`), tokens, events.
"""

from collections.abc import Callable
from dataclasses import dataclass

from app.text.syntax.reader import Reader, Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A piece of the answer proper, exactly as the model wrote it. at: position of its first
    character in all that the model wrote."""

    text: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """A piece of reasoning, exactly as the model wrote it."""

    text: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A tool call begins. id: where the syntax brings one."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The next piece of the JSON text of the last call's arguments."""

    text: str


Piece = Said | Thought | Called | Arguments


class Pieces:
    """Where a parser puts what it has understood.

    White space beside a marker belongs to the marker: what ends a text before a call or before
    reasoning, what begins or ends reasoning, and what follows either. White space that turns out to
    stand beside no marker is kept, every character of it.
    """

    def __init__(self) -> None:
        self._found: list[Piece] = []
        self._kind: type[Said] | type[Thought] | None = None
        self._fresh = False  # right behind a marker
        self._space: list[tuple[str, int]] = []  # seen, and perhaps beside a marker

    def say(self, text: str, at: int) -> None:
        self._add(Said, text, at)

    def think(self, text: str, at: int) -> None:
        self._add(Thought, text, at)

    def mark(self) -> None:
        """A marker stands here: one that begins or ends reasoning, a call, a part of the answer."""
        self._space.clear()
        self._fresh = True

    def call(self, name: str, id: str | None = None) -> None:
        self.mark()
        self._found.append(Called(name=name, id=id))

    def arguments(self, text: str) -> None:
        if text:
            self._found.append(Arguments(text=text))

    def end(self) -> None:
        """The text is over, and no marker stands at its end."""
        self._release()

    @property
    def waiting(self) -> int | None:
        """Position of the first white space that is held back."""
        return self._space[0][1] if self._space else None

    def take(self) -> list[Piece]:
        """What was found since the last time."""
        found, self._found = self._found, []
        return found

    def _add(self, kind: type[Said] | type[Thought], text: str, at: int) -> None:
        if kind is not self._kind:
            self._space.clear()
            self._kind = kind
        if self._fresh:
            at += len(text) - len(text.lstrip())
            text = text.lstrip()
            if not text:
                return
            self._fresh = False
        solid = text.rstrip()
        if solid:
            self._release()
            self._found.append(kind(text=solid, at=at))
        if len(solid) < len(text):
            self._space.append((text[len(solid) :], at + len(solid)))

    def _release(self) -> None:
        assert self._kind is not None or not self._space
        for text, at in self._space:
            self._found.append((self._kind or Said)(text=text, at=at))
        self._space.clear()


Parse = Callable[[Reader, Pieces], Wait[None]]


class Splitter:
    """An answer's text → its pieces. A stage: `feed` and `flush`; what it gives out, joined, does
    not depend on how the text was cut."""

    def __init__(self, parse: Parse) -> None:
        """parse: reads to the end of the text, whatever the text is."""
        self._reader = Reader()
        self._pieces = Pieces()
        self._parser = parse(self._reader, self._pieces)
        self._over = False
        self._resume()

    def feed(self, text: str) -> list[Piece]:
        if text:
            self._reader.push(text)
            self._resume()
        return self._pieces.take()

    def flush(self) -> list[Piece]:
        """The rest, now that no text will come."""
        self._reader.end()
        self._resume()
        assert self._over, "a parser did not read to the end"
        self._pieces.end()
        return self._pieces.take()

    @property
    def settled(self) -> int:
        """Position before which nothing is held back."""
        waiting = self._pieces.waiting
        return self._reader.settled if waiting is None else min(waiting, self._reader.settled)

    def _resume(self) -> None:
        if self._over:
            assert not self._reader.ahead, "a parser did not read to the end"
            return
        try:
            next(self._parser)
        except StopIteration:
            self._over = True
            assert self._reader.ended, "a parser ended too early"
            assert not self._reader.ahead, "a parser left text"
