"""An incremental parser that converts Python literals to JSON.

Knows: Python's literals (language reference, 2.4 and 6.2), their JSON representation. Must not
know: calls.

The parser is tolerant, because models do not always write valid literals, and chat templates render
strings without escaping them. JSON's `true`, `false` and `null` are accepted. A string may contain
line breaks. Unknown escapes are kept unchanged, except for JSON's `\\/`. A quotation mark ends a
string only if the following text is valid after a string.
"""

import json
import re
from typing import Any, cast

from app.text.syntax.literal_reader import escape_json
from app.text.syntax.nested_values import KeyPath, Notation, WriteJson
from app.text.syntax.reader import Reader, Resumable

_WORD = re.compile(r"[\w.+-]*")
_WORDS = {
    "True": "true",
    "true": "true",
    "False": "false",
    "false": "false",
    "None": "null",
    "null": "null",
}
_DECIMAL = re.compile(r"([+-]?)(?:(0|[1-9][0-9]*)(?:\.([0-9]*))?|\.([0-9]+))((?:[eE][+-]?[0-9]+)?)")
_OTHER_BASES = re.compile(r"[+-]?0([xX][0-9a-fA-F]{1,64}|[oO][0-7]{1,64}|[bB][01]{1,64})")
_QUOTES = ('"""', "'''", '"', "'")
_SIMPLE_ESCAPES = {
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\n": "",  # line continuation
}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")


def _parse_dictionary_key(reader: Reader) -> Resumable[str | None]:
    """Parses a key. JSON keys are strings, so other keys are converted to strings."""
    mark = reader.hold()
    pieces: list[str] = []
    complete = yield from _parse_scalar(reader, pieces.append)
    yield from reader.skip_space()
    if not complete or (yield from reader.accept(":")) is None:
        reader.rewind(mark)
        return None
    reader.release()
    text = "".join(pieces)
    return text if text.startswith('"') else json.dumps(text)


def _parse_scalar(reader: Reader, write: WriteJson, path: KeyPath = ()) -> Resumable[bool]:
    raw = yield from reader.peek_any(*(f"r{quote}" for quote in _QUOTES))
    if raw is not None:
        reader.take(1)
    quote = yield from reader.accept(*_QUOTES)
    if quote is not None:
        return (yield from _parse_string(reader, write, quote, raw=raw is not None))
    word = yield from reader.match(_WORD)
    converted = _WORDS.get(word) or _convert_number(word)
    if converted is None:
        return False
    reader.take(len(word))
    write(converted)
    return True


def _convert_number(word: str) -> str | None:
    """Converts a Python number to JSON. Returns None if the word is not a number or has no JSON
    representation."""
    word = word.replace("_", "")
    if _OTHER_BASES.fullmatch(word):
        return str(int(word, 0))
    match = _DECIMAL.fullmatch(word)
    if match is None:
        return None
    sign, integer, fraction, only_fraction, exponent = match.groups()
    digits = fraction if only_fraction is None else only_fraction
    text = ("-" if sign == "-" else "") + (integer or "0")
    if digits is not None:
        text += f".{digits or '0'}"
    return text + exponent


def _parse_string(reader: Reader, write: WriteJson, quote: str, *, raw: bool) -> Resumable[bool]:
    """Parses a string from its first character to its closing quotation marks."""
    write('"')
    while True:
        mark = yield from reader.read_until(
            quote, "\\", on_text=lambda text, _: write(escape_json(text))
        )
        if mark is None:
            return False
        if mark == "\\":
            write(
                (yield from _parse_raw_escape(reader))
                if raw
                else (yield from _parse_escape(reader))
            )
        elif (yield from _is_value_end(reader)):
            write('"')
            return True
        else:
            write(escape_json(quote))


def _is_value_end(reader: Reader) -> Resumable[bool]:
    """Returns whether the following text is valid after a value. Consumes nothing."""
    length = 0
    while True:
        rest = reader.ahead[length:].lstrip()
        if rest or reader.ended:
            return not rest or rest[0] in ",)]}:"
        length = len(reader.ahead)
        yield from reader.wait_for_more()


def _parse_raw_escape(reader: Reader) -> Resumable[str]:
    """Parses an escape in a raw string, in which a backslash and a following quotation mark are
    literal."""
    character = yield from reader.peek()
    return escape_json("\\" + reader.take(len(character)))


def _parse_escape(reader: Reader) -> Resumable[str]:
    """Converts an escape after its backslash to JSON."""
    character = yield from reader.peek()
    if character in _SIMPLE_ESCAPES:
        reader.take(1)
        return escape_json(_SIMPLE_ESCAPES[character])
    size = _HEX_ESCAPES.get(character, 0)
    while size and len(reader.ahead) <= size and (yield from reader.wait_for_more()):
        pass
    digits = reader.ahead[1 : size + 1]
    if not size or len(digits) < size or not _HEX.issuperset(digits):
        return "\\\\"
    code = int(digits, 16)
    if code > 0x10FFFF:
        return "\\\\"
    reader.take(size + 1)
    # the high surrogate of a pair, which JSON uses for characters beyond U+FFFF; the low surrogate
    # follows
    return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else escape_json(chr(code))


PYTHON_NOTATION = Notation(
    list_brackets={"[": "]", "(": ")"}, parse_key=_parse_dictionary_key, parse_scalar=_parse_scalar
)


def render_python_literal(value: Any) -> str:
    """Renders a JSON value as a Python literal, with strings in double quotes."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case dict():
            pairs = cast(dict[str, Any], value).items()
            rendered = (
                f"{render_python_literal(key)}: {render_python_literal(item)}"
                for key, item in pairs
            )
            return f"{{{', '.join(rendered)}}}"
        case list():
            return f"[{', '.join(map(render_python_literal, cast(list[Any], value)))}]"
        case _:
            return repr(value)
