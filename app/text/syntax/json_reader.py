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
_ESCAPED = frozenset('"\\/bfnrt')
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")

ValueEnd = Literal["complete", "broken", "cut"]
"""How a value ended: it was complete, it was followed by an invalid character (which is not
consumed), or the text ended."""


def parse_json_value(reader: Reader, on_text: OnText) -> Resumable[ValueEnd]:
    """Streams one JSON value, after optional white space. Three errors of models are repaired:
    control characters and backslashes in strings are escaped, and a trailing comma is dropped."""
    yield from reader.skip_space()
    return (yield from _scan_value(reader, _JsonScanner(), on_text))


def parse_json_to_own_bracket(reader: Reader, on_text: OnText) -> Resumable[ValueEnd]:
    """Like `parse_json_value`, but an invalid object or list is output unchanged, from the error up
    to the bracket that closes it, and is then complete. It is broken if `reader.call_ends` comes
    first."""
    yield from reader.skip_space()
    scanner = _JsonScanner()
    end = yield from _scan_value(reader, scanner, on_text)
    if end == "broken" and scanner.depth:
        return (yield from _read_to_own_bracket(reader, scanner.depth, on_text))
    return end


def _scan_value(reader: Reader, scanner: "_JsonScanner", on_text: OnText) -> Resumable[ValueEnd]:
    end: ValueEnd = "cut"
    while (yield from reader.peek()):
        ahead, at = reader.ahead, reader.at
        count, text = scanner.feed(ahead)
        reader.take(count)
        if text:
            on_text(text, at)
        if scanner.done:
            return "complete"
        if count < len(ahead):
            end = "broken"
            break
    if scanner.finish():
        return "complete"
    if held := scanner.take_held():
        on_text(held, reader.at - len(held))
    return end


def _read_to_own_bracket(reader: Reader, depth: int, on_text: OnText) -> Resumable[ValueEnd]:
    marks = reader.call_ends
    while depth:
        stop = yield from reader.read_before(*'{}[]"', *marks, on_text=on_text)
        if stop is None:
            return "cut"
        if stop in marks:
            return "broken"
        on_text(reader.take(1), reader.at - 1)
        if stop == '"':
            yield from _read_string_end(reader, marks, on_text)
        else:
            depth += 1 if stop in "{[" else -1
    return "complete"


def _read_string_end(reader: Reader, marks: tuple[str, ...], on_text: OnText) -> Resumable[None]:
    """Outputs the rest of a string unchanged, up to its closing quote or one of the marks."""
    while (
        stop := (yield from reader.read_before('"', '\\"', "\\\\", *marks, on_text=on_text))
    ) is not None and stop not in marks:
        on_text(reader.take(len(stop)), reader.at - len(stop))
        if stop == '"':
            return


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
        self._held = ""  # an escape, or a comma and white space, whose meaning is not known yet

    @property
    def depth(self) -> int:
        """The number of open brackets."""
        return len(self._open)

    def feed(self, text: str) -> tuple[int, str]:
        """Returns the number of characters that belong to the value, and the output for them."""
        written: list[str] = []
        for count, character in enumerate(text):
            output = None if self.done else self._step(character)
            if output is None:
                return count, "".join(written)
            written.append(output)
        return len(text), "".join(written)

    def finish(self) -> bool:
        """Returns whether the value is complete if no more characters follow."""
        if self._expect == "number" and not self._open and _is_number(self._word):
            self.done = True
        return self.done

    def take_held(self) -> str:
        """Returns the text that is held back, if the value ends here."""
        held, self._held = self._held, ""
        return held

    def _step(self, c: str) -> str | None:
        """Returns the output for a character, or None if the character is invalid."""
        match self._expect:
            case "string":
                return self._step_string(c)
            case "escape":
                if c == "u":
                    self._expect, self._held = "hex", "\\u"
                    return ""
                self._expect, self._held = "string", ""
                return f"\\{c}" if c in _ESCAPED else f"\\\\{self._step_string(c)}"
            case "hex":
                return self._step_hex(c)
            case "word":
                ok, self._word = c == self._word[0], self._word[1:]
                if ok and not self._word:
                    self._end_value()
                return c if ok else None
            case "number" if c in _NUMBER_CHARACTERS:
                self._word += c
                return c
            case "number":
                if not _is_number(self._word):
                    return None
                self._end_value()
                return None if self.done else self._step_structure(c)
            case _:
                return self._step_structure(c)

    def _step_string(self, c: str) -> str:
        if c == "\\":
            self._expect, self._held = "escape", c
            return ""
        if c == '"':
            if self._is_key:
                self._is_key, self._expect = False, "colon"
            else:
                self._end_value()
        return _escape_control(c) if c < " " else c

    def _step_hex(self, c: str) -> str:
        if c not in _HEX_DIGITS:  # not an escape, but a backslash such as in C:\users
            held, self._held, self._expect = self._held, "", "string"
            return f"\\{held}{self._step_string(c)}"
        self._held += c
        if len(self._held) < len("\\uffff"):
            return ""
        self._expect = "string"
        return self.take_held()

    def _step_structure(self, c: str) -> str | None:
        if c in _SPACE:
            if self._held:
                self._held += c
                return ""
            return c
        if c in "]}":
            return self._step_close(c)
        held = self.take_held()
        if not self._begin_token(c):
            self._held = held
            return None
        if self._held:  # a comma
            return held
        return held + c

    def _step_close(self, c: str) -> str | None:
        closes = ("first", "comma") if c == "]" else ("name", "comma")
        after_comma = self._held and self._expect in ("key", "value")
        if not (self._expect in closes or after_comma):
            return None
        if self._open[-1:] != ["[" if c == "]" else "{"]:
            return None
        self._open.pop()
        self._end_value()
        return self.take_held()[1:] + c

    def _begin_token(self, c: str) -> bool:
        match self._expect:
            case "name" | "key" if c == '"':
                self._is_key, self._expect = True, "string"
            case "colon" if c == ":":
                self._expect = "value"
            case "comma" if c == ",":
                self._expect = "key" if self._open[-1] == "{" else "value"
                self._held = c
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
