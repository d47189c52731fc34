"""Objects and lists in JSON or as Python prints them, handed on as JSON while they are written.

    {'append': True, 'tags': ["it's", None]}  →  {"append": true, "tags": ["it's", null]}

Templates that print arguments with Jinja's `string` teach models Python's notation, `tojson`
teaches them JSON; the two differ in their quotes, three words and a few escapes, and nothing that
is right in both means two things.

Knows: strings and words of both notations. Must not know: what the value means, and whether its
brackets match: that is for whoever reads the JSON.
"""

import json
import re
from collections.abc import Callable

from app.text.syntax.reader import Reader, Wait

_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = frozenset('"\\/bfnrtu')  # JSON's own
_HEX = re.compile(r"[0-9a-fA-F]+")


def literal_before(reader: Reader, *marks: str, take: Callable[[str], None]) -> Wait[str | None]:
    """Hand on the text before the first of these marks that stands outside of a string. Which it
    is, not taken; None when the text ended without one."""
    while True:
        stop = yield from reader.before('"', "'", *_WORDS, *marks, take=lambda text, _: take(text))
        if stop is None or stop in marks:
            return stop
        reader.take(len(stop))
        if stop in _WORDS:
            take(_WORDS[stop])
        else:
            take('"')
            yield from _string(reader, stop, take)


def literal(text: str) -> str:
    """All of a text as JSON."""
    reader, pieces = Reader(), list[str]()
    reader.push(text)
    reader.end()
    for _ in literal_before(reader, take=pieces.append):
        raise AssertionError("nothing is to be waited for")
    return "".join(pieces)


def quoted(text: str) -> str:
    """What a text is between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _string(reader: Reader, quote: str, take: Callable[[str], None]) -> Wait[None]:
    """The rest of a string, its end included."""
    while True:
        stop = yield from reader.until(
            quote, '"', "\\", take=lambda text, _: take(_controls_escaped(text))
        )
        if stop is None:
            return
        if stop == quote:
            take('"')
            return
        if stop == '"':
            take('\\"')
        else:
            take((yield from _escape(reader)))


def _escape(reader: Reader) -> Wait[str]:
    """What follows a backslash, in JSON. One that escapes nothing stands for itself, as in
    Python."""
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
        yield from reader.more()
    code = reader.ahead[1 : digits + 1]
    if len(code) < digits or not _HEX.fullmatch(code) or int(code, 16) > 0x10FFFF:
        return "\\\\"
    reader.take(digits + 1)
    return json.dumps(chr(int(code, 16)))[1:-1]


def _controls_escaped(text: str) -> str:
    """JSON has no control characters in strings; models write line ends there all the same."""
    return "".join(quoted(c) if c < " " else c for c in text)
