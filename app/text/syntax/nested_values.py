"""Lists and mappings in whatever notation, handed on as JSON while they are being written.

    {name: 'a', tags: [1, 2,]}  →  {"name": "a", "tags": [1, 2]}

Knows: brackets, commas, and that they lie within each other. Must not know: how a notation writes
keys and what is no list and no mapping.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.text.syntax.reader import Reader, Resumable

WriteJson = Callable[[str], None]
"""Takes the next piece of JSON text."""

KeyPath = tuple[str | None, ...]
"""Where a value stands: the keys that lead to it, None for an item of a list."""

ParseKey = Callable[[Reader], Resumable[str | None]]
"""Reads a key and the sign behind it; the key as JSON text. None, and nothing taken, if there is
none."""

ParseScalar = Callable[[Reader, WriteJson, KeyPath], Resumable[bool]]
"""Reads what is no list and no mapping. Whether it could be read to its end; if it could not be
read at all, nothing was taken."""

_MAX_DEPTH = 64  # brackets within brackets; what lies deeper is no value


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """list_brackets: what begins a list → what ends it. parse_key: of a mapping. Mappings stand in
    braces."""

    list_brackets: Mapping[str, str]
    parse_key: ParseKey
    parse_scalar: ParseScalar


def parse_nested_value(
    notation: Notation, reader: Reader, write: WriteJson, path: KeyPath = ()
) -> Resumable[bool]:
    """One value, white space before it skipped. Whether it could be read to its end. What could
    not be read was not taken."""
    yield from reader.skip_space()
    if len(path) < _MAX_DEPTH:
        opened = yield from reader.accept("{", *notation.list_brackets)
        if opened == "{":
            write("{")
            return (yield from parse_nested_pairs(notation, reader, write, path=path))
        if opened is not None:
            write("[")
            return (
                yield from _parse_items(
                    notation, reader, write, notation.list_brackets[opened], path
                )
            )
    return (yield from notation.parse_scalar(reader, write, path))


def parse_nested_pairs(
    notation: Notation,
    reader: Reader,
    write: WriteJson,
    *,
    parse_key: ParseKey | None = None,
    close: str = "}",
    path: KeyPath = (),
) -> Resumable[bool]:
    """The rest of a mapping behind its opening bracket, up to `close`. parse_key: where keys are
    written in another way than the notation's."""
    before = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept(close)) is not None:
            write("}")
            return True
        name = yield from (parse_key or notation.parse_key)(reader)
        if name is None:
            return False
        write(f"{before}{name}: ")
        before = ", "
        if not (yield from parse_nested_value(notation, reader, write, (*path, json.loads(name)))):
            return False
        yield from reader.skip_space()
        if (yield from reader.accept(",")) is None and (yield from reader.peek()) != close:
            return False


def _parse_items(
    notation: Notation, reader: Reader, write: WriteJson, close: str, path: KeyPath
) -> Resumable[bool]:
    before = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept(close)) is not None:
            write("]")
            return True
        if not (
            yield from parse_nested_value(
                notation, reader, _write_after(before, write), (*path, None)
            )
        ):
            return False
        before = ", "
        yield from reader.skip_space()
        if (yield from reader.accept(",")) is None and (yield from reader.peek()) != close:
            return False


def _write_after(before: str, write: WriteJson) -> WriteJson:
    """Writes `before` too, with the first piece."""
    waiting = [before]

    def written(text: str) -> None:
        write(waiting.pop() + text if waiting else text)

    return written
