"""An incremental JSON reader, which outputs a value as it is generated.

Knows: JSON's grammar (RFC 8259). Must not know: the meaning of the value.
"""

import json
import re
from typing import Literal

from app.text.syntax.reader import OnText, Reader, Resumable

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SPACE = frozenset(" \t\n\r")

ValueEnd = Literal["complete", "broken", "cut"]
"""How a value ended: it was complete, it was followed by an invalid character (which is not
consumed), or the text ended."""


def parse_json_value(reader: Reader, on_text: OnText) -> Resumable[ValueEnd]:
    """Streams one JSON value, after optional white space. Control characters in strings, which
    models write although JSON forbids them, are escaped."""
    yield from reader.skip_space()
    scan = _JsonScanner()
    while (yield from reader.peek()):
        ahead, at = reader.ahead, reader.at
        count, text = scan.feed(ahead)
        if count:
            reader.take(count)
            on_text(text, at)
        if scan.done:
            return "complete"
        if count < len(ahead):
            return "complete" if scan.finish() else "broken"
    return "complete" if scan.finish() else "cut"


def parse_json_string(reader: Reader) -> Resumable[str | None]:
    """Reads a JSON string, after optional white space, and decodes it. Returns None if the string
    is incomplete or `decode_json_string` returns None."""
    yield from reader.skip_space()
    if (yield from reader.peek()) != '"':
        return None
    pieces: list[str] = []
    end = yield from parse_json_value(reader, lambda text, at: pieces.append(text))
    return decode_json_string("".join(pieces)) if end == "complete" else None


def decode_json_string(string: str) -> str | None:
    """Returns the text of a complete JSON string. Returns None if the string contains an unpaired
    surrogate."""
    text: str = json.loads(string)
    return None if any("\ud800" <= character <= "\udfff" for character in text) else text


class _JsonScanner:
    """A push-down automaton over characters.

    expect: the expected token: value, first (a value or the end of an array), key, name (a key or
    the end of an object), colon, comma, string, escape, hex, number, word or nothing.
    """

    def __init__(self) -> None:
        self.done = False
        self._expect = "value"
        self._open: list[str] = []  # the open brackets, "{" and "["
        self._is_key = False
        self._word = ""  # the rest of true, false or null; the start of a number
        self._hex_digits_left = 0

    def feed(self, text: str) -> tuple[int, str]:
        """Returns the number of characters that belong to the value, and the output for them."""
        written: list[str] = []
        for count, character in enumerate(text):
            if self.done or not self._step(character):
                return count, "".join(written)
            in_string = self._expect == "string" and character < " "
            written.append(_escape_control(character) if in_string else character)
        return len(text), "".join(written)

    def finish(self) -> bool:
        """Returns whether the value is complete if no more characters follow."""
        if self._expect == "number" and not self._open and _is_number(self._word):
            self.done = True
        return self.done

    def _step(self, c: str) -> bool:
        match self._expect:
            case "string":
                return self._step_string(c)
            case "escape":
                self._expect, self._hex_digits_left = ("hex", 4) if c == "u" else ("string", 0)
                return c in '"\\/bfnrtu'
            case "hex":
                self._hex_digits_left -= 1
                self._expect = "hex" if self._hex_digits_left else "string"
                return c in "0123456789abcdefABCDEF"
            case "word":
                ok, self._word = c == self._word[0], self._word[1:]
                if ok and not self._word:
                    self._end_value()
                return ok
            case "number" if c in _NUMBER_CHARACTERS:
                self._word += c
                return True
            case "number":
                if not _is_number(self._word):
                    return False
                self._end_value()
                return not self.done and self._step_structure(c)
            case _:
                return self._step_structure(c)

    def _step_string(self, c: str) -> bool:
        if c == "\\":
            self._expect = "escape"
        elif c == '"':
            if self._is_key:
                self._is_key, self._expect = False, "colon"
            else:
                self._end_value()
        return True

    def _step_structure(self, c: str) -> bool:
        if c in _SPACE:
            return True
        expect = self._expect
        if c in "]}":
            closes = ("first", "comma") if c == "]" else ("name", "comma")
            if expect not in closes or self._open[-1:] != ["[" if c == "]" else "{"]:
                return False
            self._open.pop()
            self._end_value()
            return True
        match expect:
            case "name" | "key" if c == '"':
                self._is_key, self._expect = True, "string"
            case "colon" if c == ":":
                self._expect = "value"
            case "comma" if c == ",":
                self._expect = "key" if self._open[-1] == "{" else "value"
            case "value" | "first":
                return self._begin_value(c)
            case _:
                return False
        return True

    def _begin_value(self, c: str) -> bool:
        match c:
            case "{" | "[":
                self._open.append(c)
                self._expect = "name" if c == "{" else "first"
            case '"':
                self._expect = "string"
            case "t" | "f" | "n":
                self._expect = "word"
                self._word = {"t": "rue", "f": "alse", "n": "ull"}[c]
            case _ if c == "-" or c in "0123456789":
                self._expect, self._word = "number", c
            case _:
                return False
        return True

    def _end_value(self) -> None:
        self._expect = "comma"
        self.done = not self._open


def _escape_control(character: str) -> str:
    return _ESCAPES.get(character) or f"\\u{ord(character):04x}"


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None
