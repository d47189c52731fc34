"""An incremental parser that converts nested lists and mappings in any notation to JSON.

    {name: 'a', tags: [1, 2,]}  →  {"name": "a", "tags": [1, 2]}

Knows: brackets, commas, nesting. Must not know: the notation of keys and scalar values.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.text.syntax.reader import Reader, Resumable

WriteJson = Callable[[str], None]
"""A callback that receives the next chunk of JSON text."""

KeyPath = tuple[str | None, ...]
"""The location of a value, as the list of keys that lead to it. An item of a list has the key
None."""

ParseKey = Callable[[Reader], Resumable[str | None]]
"""Parses a key and its separator. Returns the key as JSON text. If there is no key, returns None
and consumes nothing."""

ParseScalar = Callable[[Reader, WriteJson, KeyPath], Resumable[bool]]
"""Parses a scalar value. Returns whether the value was complete. If it cannot be parsed, nothing is
consumed."""

_MAX_DEPTH = 64  # maximum depth of nested brackets; deeper values are rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """The notation of lists and mappings. list_brackets: the closing bracket for each opening
    bracket of a list. parse_key: the parser for the keys of mappings. Mappings are always in
    braces."""

    list_brackets: Mapping[str, str]
    parse_key: ParseKey
    parse_scalar: ParseScalar


def parse_nested_value(
    notation: Notation, reader: Reader, write: WriteJson, path: KeyPath = ()
) -> Resumable[bool]:
    """Parses one value, after optional white space. Returns whether it was complete. Invalid text
    is not consumed."""
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
    """Parses the rest of a mapping after its opening bracket, up to `close`. parse_key: a
    replacement for the notation's key parser."""
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
    """Returns a writer that writes `before` together with the first chunk."""
    waiting = [before]

    def written(text: str) -> None:
        write(waiting.pop() + text if waiting else text)

    return written
