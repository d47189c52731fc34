"""JSON as a model writes it, handed on piece by piece while it is still being written.

Knows: JSON's grammar (RFC 8259). Must not know: what the value means.
"""

import json
import re
from typing import Literal

from app.text.syntax.reader import Reader, Take, Wait

_ESCAPED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_NUMBER_GOES_ON = frozenset("0123456789+-.eE")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SPACE = frozenset(" \t\n\r")

End = Literal["whole", "broken", "cut"]
"""How a value ended: complete; at a character that cannot stand there, which is not taken; with the
text."""


def json_value(reader: Reader, take: Take) -> Wait[End]:
    """One JSON value, white space before it skipped, handed on as it is written; but for control
    characters within strings, which models write and JSON forbids: those are handed on escaped."""
    yield from reader.space()
    scan = _Scan()
    while (yield from reader.peek()):
        ahead, at = reader.ahead, reader.at
        count, text = scan.feed(ahead)
        if count:
            reader.take(count)
            take(text, at)
        if scan.done:
            return "whole"
        if count < len(ahead):
            return "whole" if scan.end() else "broken"
    return "whole" if scan.end() else "cut"


def json_string(reader: Reader) -> Wait[str | None]:
    """A JSON string, decoded, white space before it skipped; None if there is no whole one, or none
    that `decoded` knows."""
    yield from reader.space()
    if (yield from reader.peek()) != '"':
        return None
    pieces: list[str] = []
    end = yield from json_value(reader, lambda text, at: pieces.append(text))
    return decoded("".join(pieces)) if end == "whole" else None


def decoded(string: str) -> str | None:
    """The text of a whole JSON string; None where that is no text: half of a surrogate pair."""
    text: str = json.loads(string)
    return None if any("\ud800" <= character <= "\udfff" for character in text) else text


class _Scan:
    """A push-down automaton over characters.

    expect: what may come next, one of value, first (a value or the end of an array), key, name (a
    key or the end of an object), colon, comma, string, escape, hex, number, word, nothing.
    """

    def __init__(self) -> None:
        self.done = False
        self._expect = "value"
        self._open: list[str] = []  # "{" and "["
        self._is_key = False
        self._word = ""  # of true, false, null: what is still to come; of a number: all so far
        self._hex = 0

    def feed(self, text: str) -> tuple[int, str]:
        """How many characters belong to the value, and how they are to be written."""
        written: list[str] = []
        for count, character in enumerate(text):
            if self.done or not self._step(character):
                return count, "".join(written)
            in_string = self._expect == "string" and character < " "
            written.append(_control(character) if in_string else character)
        return len(text), "".join(written)

    def end(self) -> bool:
        """Whether the value is complete if nothing more belongs to it."""
        if self._expect == "number" and not self._open and _is_number(self._word):
            self.done = True
        return self.done

    def _step(self, c: str) -> bool:
        match self._expect:
            case "string":
                return self._string(c)
            case "escape":
                self._expect, self._hex = ("hex", 4) if c == "u" else ("string", 0)
                return c in '"\\/bfnrtu'
            case "hex":
                self._hex -= 1
                self._expect = "hex" if self._hex else "string"
                return c in "0123456789abcdefABCDEF"
            case "word":
                ok, self._word = c == self._word[0], self._word[1:]
                if ok and not self._word:
                    self._value_ended()
                return ok
            case "number" if c in _NUMBER_GOES_ON:
                self._word += c
                return True
            case "number":
                if not _is_number(self._word):
                    return False
                self._value_ended()
                return not self.done and self._structure(c)
            case _:
                return self._structure(c)

    def _string(self, c: str) -> bool:
        if c == "\\":
            self._expect = "escape"
        elif c == '"':
            if self._is_key:
                self._is_key, self._expect = False, "colon"
            else:
                self._value_ended()
        return True

    def _structure(self, c: str) -> bool:
        if c in _SPACE:
            return True
        expect = self._expect
        if c in "]}":
            closes = ("first", "comma") if c == "]" else ("name", "comma")
            if expect not in closes or self._open[-1:] != ["[" if c == "]" else "{"]:
                return False
            self._open.pop()
            self._value_ended()
            return True
        match expect:
            case "name" | "key" if c == '"':
                self._is_key, self._expect = True, "string"
            case "colon" if c == ":":
                self._expect = "value"
            case "comma" if c == ",":
                self._expect = "key" if self._open[-1] == "{" else "value"
            case "value" | "first":
                return self._begin(c)
            case _:
                return False
        return True

    def _begin(self, c: str) -> bool:
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

    def _value_ended(self) -> None:
        self._expect = "comma"
        self.done = not self._open


def _control(character: str) -> str:
    return _ESCAPED.get(character) or f"\\u{ord(character):04x}"


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None
