"""Lists and mappings in whatever notation, handed on as JSON while they are being written.

    {name: 'a', tags: [1, 2,]}  →  {"name": "a", "tags": [1, 2]}

Knows: brackets, commas, and that they lie within each other. Must not know: how a notation writes
keys and what is no list and no mapping.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.text.syntax.reader import Reader, Wait

Write = Callable[[str], None]
"""Takes the next piece of JSON text."""

Path = tuple[str | None, ...]
"""Where a value stands: the keys that lead to it, None for an item of a list."""

Key = Callable[[Reader], Wait[str | None]]
"""Reads a key and the sign behind it; the key as JSON text. None, and nothing taken, if there is
none."""

Scalar = Callable[[Reader, Write, Path], Wait[bool]]
"""Reads what is no list and no mapping. Whether it could be read to its end; if it could not be
read at all, nothing was taken."""

_DEEPEST = 64  # brackets within brackets; what lies deeper is no value


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """lists: what begins a list → what ends it. key: of a mapping. Mappings stand in braces."""

    lists: Mapping[str, str]
    key: Key
    scalar: Scalar


def nested_value(notation: Notation, reader: Reader, write: Write, path: Path = ()) -> Wait[bool]:
    """One value, white space before it skipped. Whether it could be read to its end. What could
    not be read was not taken."""
    yield from reader.space()
    if len(path) < _DEEPEST:
        opened = yield from reader.accept("{", *notation.lists)
        if opened == "{":
            write("{")
            return (yield from nested_pairs(notation, reader, write, path=path))
        if opened is not None:
            write("[")
            return (yield from _items(notation, reader, write, notation.lists[opened], path))
    return (yield from notation.scalar(reader, write, path))


def nested_pairs(
    notation: Notation,
    reader: Reader,
    write: Write,
    *,
    key: Key | None = None,
    close: str = "}",
    path: Path = (),
) -> Wait[bool]:
    """The rest of a mapping behind its opening bracket, up to `close`. key: where keys are written
    in another way than the notation's."""
    before = ""
    while True:
        yield from reader.space()
        if (yield from reader.accept(close)) is not None:
            write("}")
            return True
        name = yield from (key or notation.key)(reader)
        if name is None:
            return False
        write(f"{before}{name}: ")
        before = ", "
        if not (yield from nested_value(notation, reader, write, (*path, json.loads(name)))):
            return False
        yield from reader.space()
        if (yield from reader.accept(",")) is None and (yield from reader.peek()) != close:
            return False


def _items(notation: Notation, reader: Reader, write: Write, close: str, path: Path) -> Wait[bool]:
    before = ""
    while True:
        yield from reader.space()
        if (yield from reader.accept(close)) is not None:
            write("]")
            return True
        if not (yield from nested_value(notation, reader, _behind(before, write), (*path, None))):
            return False
        before = ", "
        yield from reader.space()
        if (yield from reader.accept(",")) is None and (yield from reader.peek()) != close:
            return False


def _behind(before: str, write: Write) -> Write:
    """Writes `before` too, with the first piece."""
    waiting = [before]

    def written(text: str) -> None:
        write(waiting.pop() + text if waiting else text)

    return written
