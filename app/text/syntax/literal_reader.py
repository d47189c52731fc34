"""An incremental converter from objects and lists in JSON or Python notation to JSON.

    {'append': True, 'tags': ["it's", None]}  →  {"append": true, "tags": ["it's", null]}

Knows: the strings and keywords of both notations. Must not know: the meaning of the value, bracket
matching (checked by the JSON parser).

Templates that render arguments with Jinja's `string` filter train models on Python notation, and
templates with `tojson` train models on JSON. The notations differ in quotes, three keywords and a
few escapes. Text that is valid in both notations has the same meaning in both.
"""

import json
import re
from collections.abc import Callable

from app.text.syntax.reader import Reader, Resumable

_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = frozenset('"\\/bfnrtu')  # JSON's own escapes
_HEX = re.compile(r"[0-9a-fA-F]+")


def convert_literal_before(
    reader: Reader, *marks: str, on_text: Callable[[str], None]
) -> Resumable[str | None]:
    """Outputs the text up to the first of the given marks outside of a string. Returns the mark,
    which is not consumed, or None if the text ends without a mark."""
    while True:
        stop = yield from reader.read_before(
            '"', "'", *_WORDS, *marks, on_text=lambda text, _: on_text(text)
        )
        if stop is None or stop in marks:
            return stop
        reader.take(len(stop))
        if stop in _WORDS:
            on_text(_WORDS[stop])
        else:
            on_text('"')
            yield from _convert_string(reader, stop, on_text)


def convert_literal(text: str) -> str:
    """Converts a complete text to JSON."""
    reader, pieces = Reader(), list[str]()
    reader.push(text)
    reader.end()
    for _ in convert_literal_before(reader, on_text=pieces.append):
        raise AssertionError("the converter must not wait for more text")
    return "".join(pieces)


def escape_json(text: str) -> str:
    """Escapes text for a JSON string, without adding quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _convert_string(reader: Reader, quote: str, on_text: Callable[[str], None]) -> Resumable[None]:
    """Converts the rest of a string, including its closing quote."""
    while True:
        stop = yield from reader.read_until(
            quote, '"', "\\", on_text=lambda text, _: on_text(_escape_controls(text))
        )
        if stop is None:
            return
        if stop == quote:
            on_text('"')
            return
        if stop == '"':
            on_text('\\"')
        else:
            on_text((yield from _convert_escape(reader)))


def _convert_escape(reader: Reader) -> Resumable[str]:
    """Converts the characters after a backslash to JSON. As in Python, an unknown escape is kept
    unchanged."""
    kind = yield from reader.peek()
    if not kind:
        return "\\"
    if kind in _ESCAPES:
        return "\\" + reader.take(1)
    if kind == "'":
        return reader.take(1)
    digits = {"x": 2, "U": 8}.get(kind)
    if digits is None:
        return "\\\\"
    while len(reader.ahead) <= digits and not reader.ended:
        yield from reader.wait_for_more()
    code = reader.ahead[1 : digits + 1]
    if len(code) < digits or not _HEX.fullmatch(code) or int(code, 16) > 0x10FFFF:
        return "\\\\"
    reader.take(digits + 1)
    return json.dumps(chr(int(code, 16)))[1:-1]


def _escape_controls(text: str) -> str:
    """Escapes control characters, which JSON forbids in strings, because models write line
    breaks."""
    return "".join(escape_json(c) if c < " " else c for c in text)
