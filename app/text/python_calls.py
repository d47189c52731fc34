"""Calls written as Python writes them, `get_weather(city="Oslo", days=3)`, as they are being written.

Knows: Python's literals (language reference, 2.4 and 6.2) and what each is as JSON. Must not know:
what stands around the calls, which is a family's affair.

Models write this loosely, and chat templates print strings without escaping what is in them. So
JSON's `true`, `false` and `null` count too; a string may run over several lines; an escape that
Python does not know stands for itself, but for JSON's `\\/`; and a quotation mark ends a string only
where something follows that can stand behind one.
"""

import json
import re
from collections.abc import Callable, Collection

from app.text.call_object import Outcome
from app.text.pieces import Pieces
from app.text.reader import Reader, Wait

Write = Callable[[str], None]

_NAME = re.compile(r"[^\W\d][\w.-]*")
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
    "\n": "",  # goes on in the next line
}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
_DEEPEST = 64  # brackets within brackets; what goes deeper is no value


def python_list(
    reader: Reader, pieces: Pieces, *, names: Collection[str] | None = None
) -> Wait[Outcome]:
    """Read `[f(…), g(…)]`, white space before it skipped. names, and what the caller does before
    and after: as `call_object`. What follows a whole call and is neither another one nor the end of
    the list is not taken."""
    yield from reader.space()
    if (yield from reader.accept("[")) is None:
        return "none"
    outcome = yield from python_calls(reader, pieces, names=names)
    if outcome == "whole":
        held = reader.hold()
        yield from reader.space()
        if (yield from reader.accept("]")) is None:
            reader.rewind(held)
        reader.release()
    return outcome


def python_calls(
    reader: Reader, pieces: Pieces, *, names: Collection[str] | None = None
) -> Wait[Outcome]:
    """Read `f(…)`, and others behind commas or white space; else as `python_list`."""
    yield from reader.space()
    outcome = yield from python_call(reader, pieces, names=names)
    while outcome == "whole":
        held = reader.hold()
        yield from reader.space()
        yield from reader.accept(",")
        yield from reader.space()
        outcome = yield from python_call(reader, pieces, names=names)
        if outcome == "none":
            reader.rewind(held)
            return "whole"
    return outcome


def python_call(
    reader: Reader, pieces: Pieces, *, names: Collection[str] | None = None
) -> Wait[Outcome]:
    """Read one call. Its arguments are by name, each converted as it comes."""
    name = yield from reader.match(_NAME)
    if not name or (names is not None and name not in names):
        return "none"
    reader.take(len(name))
    if (yield from reader.accept("(")) is None:
        return "none"
    pieces.call(name)
    reader.release()
    pieces.arguments("{")
    whole = yield from _pairs(reader, pieces.arguments, ")", _keyword, depth=0)
    if whole:
        pieces.arguments("}")
    return "whole" if whole else "broken"


Key = Callable[[Reader], Wait[str | None]]
"""Reads a key and the sign behind it; the key as JSON text. None, and the key not taken, if there
is none."""


def _pairs(reader: Reader, write: Write, close: str, key: Key, *, depth: int) -> Wait[bool]:
    """Keys and values up to `close`. Whether that was reached."""
    first = True
    while True:
        yield from reader.space()
        if (yield from reader.accept(close)) is not None:
            return True
        name = yield from key(reader)
        if name is None:
            return False
        write(f"{name}: " if first else f", {name}: ")
        first = False
        if not (yield from _value(reader, write, depth)):
            return False
        yield from reader.space()
        if (yield from reader.accept(",")) is None and (yield from reader.peek()) != close:
            return False


def _items(reader: Reader, write: Write, close: str, *, depth: int) -> Wait[bool]:
    first = True
    while True:
        yield from reader.space()
        if (yield from reader.accept(close)) is not None:
            return True
        # an item that cannot be read leaves the comma to the text that follows
        started = _once(write, "" if first else ", ")
        first = False
        if not (yield from _value(reader, started, depth)):
            return False
        yield from reader.space()
        if (yield from reader.accept(",")) is None and (yield from reader.peek()) != close:
            return False


def _once(write: Write, before: str) -> Write:
    """Writes `before` with the first piece."""
    waiting = [before]

    def written(text: str) -> None:
        write(waiting.pop() + text if waiting else text)

    return written


def _keyword(reader: Reader) -> Wait[str | None]:
    held = reader.hold()
    name = yield from reader.match(_NAME)
    reader.take(len(name))
    yield from reader.space()
    if not name or (yield from reader.accept("=")) is None:
        reader.rewind(held)
        return None
    reader.release()
    return json.dumps(name, ensure_ascii=False)


def _dictionary_key(reader: Reader) -> Wait[str | None]:
    """JSON knows no keys but strings: others are written as one."""
    held = reader.hold()
    pieces: list[str] = []
    whole = yield from _scalar(reader, pieces.append)
    yield from reader.space()
    if not whole or (yield from reader.accept(":")) is None:
        reader.rewind(held)
        return None
    reader.release()
    text = "".join(pieces)
    return text if text.startswith('"') else json.dumps(text)


def _value(reader: Reader, write: Write, depth: int) -> Wait[bool]:
    """One value as JSON. Whether it was one; of a scalar that is none, nothing was taken."""
    yield from reader.space()
    if depth < _DEEPEST:
        match (yield from reader.accept("[", "(", "{")):
            case "[":
                write("[")
                whole = yield from _items(reader, write, "]", depth=depth + 1)
                return _closed(whole, write, "]")
            case "(":
                write("[")
                whole = yield from _items(reader, write, ")", depth=depth + 1)
                return _closed(whole, write, "]")
            case "{":
                write("{")
                whole = yield from _pairs(reader, write, "}", _dictionary_key, depth=depth + 1)
                return _closed(whole, write, "}")
            case _:
                pass
    return (yield from _scalar(reader, write))


def _closed(whole: bool, write: Write, close: str) -> bool:
    if whole:
        write(close)
    return whole


def _scalar(reader: Reader, write: Write) -> Wait[bool]:
    raw = yield from reader.meets(*(f"r{quote}" for quote in _QUOTES))
    if raw is not None:
        reader.take(1)
    quote = yield from reader.accept(*_QUOTES)
    if quote is not None:
        return (yield from _string(reader, write, quote, raw=raw is not None))
    word = yield from reader.match(_WORD)
    converted = _WORDS.get(word) or _number(word)
    if converted is None:
        return False
    reader.take(len(word))
    write(converted)
    return True


def _number(word: str) -> str | None:
    """A Python number as JSON. None if it is none, or none that JSON has."""
    word = word.replace("_", "")
    if _OTHER_BASES.fullmatch(word):
        return str(int(word, 0))
    match = _DECIMAL.fullmatch(word)
    if match is None:
        return None
    sign, whole, fraction, only_fraction, exponent = match.groups()
    digits = fraction if only_fraction is None else only_fraction
    text = ("-" if sign == "-" else "") + (whole or "0")
    if digits is not None:
        text += f".{digits or '0'}"
    return text + exponent


def _string(reader: Reader, write: Write, quote: str, *, raw: bool) -> Wait[bool]:
    """What follows the opening quotation marks, to the closing ones."""
    write('"')
    while True:
        mark = yield from reader.until(quote, "\\", take=lambda text, _: write(_quoted(text)))
        if mark is None:
            return False
        if mark == "\\":
            write((yield from _raw_escape(reader)) if raw else (yield from _escape(reader)))
        elif (yield from _ends_value(reader)):
            write('"')
            return True
        else:
            write(_quoted(quote))


def _ends_value(reader: Reader) -> Wait[bool]:
    """Whether something follows that can stand behind a value: nothing is taken."""
    seen = 0
    while True:
        rest = reader.ahead[seen:].lstrip()
        if rest or reader.ended:
            return not rest or rest[0] in ",)]}:"
        seen = len(reader.ahead)
        yield from reader.more()


def _raw_escape(reader: Reader) -> Wait[str]:
    """In a raw string, a backslash stands for itself, and so does a quotation mark behind it."""
    character = yield from reader.peek()
    return _quoted("\\" + reader.take(len(character)))


def _escape(reader: Reader) -> Wait[str]:
    """What follows a backslash, as JSON writes it within a string."""
    character = yield from reader.peek()
    if character in _SIMPLE_ESCAPES:
        reader.take(1)
        return _quoted(_SIMPLE_ESCAPES[character])
    size = _HEX_ESCAPES.get(character, 0)
    while size and len(reader.ahead) <= size and (yield from reader.more()):
        pass
    digits = reader.ahead[1 : size + 1]
    if not size or len(digits) < size or not _HEX.issuperset(digits):
        return "\\\\"
    code = int(digits, 16)
    if code > 0x10FFFF:
        return "\\\\"
    reader.take(size + 1)
    # half of a pair, as JSON writes characters beyond U+FFFF: the other half follows
    return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else _quoted(chr(code))


def _quoted(text: str) -> str:
    """Within JSON's quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
