"""Streams the arguments of a tool call as fragments of valid JSON.

Knows: JSON objects. Must not know: events, blocks.

Clients parse the arguments after each fragment, and run a call when its arguments are complete.
Like in Anthropic's API, a fragment therefore contains only complete members of the object. The
concatenated fragments of a call always form one object without trailing text:

    {"path": "a.py", "text": "cut o        →  {"path": "a.py"}
    {"path": "a.py", oops                  →  {"path": "a.py", "invalid_arguments": " oops"}
"""

import re
from typing import Literal

import orjson

from app.api.openai.chat import INVALID_ARGUMENTS_KEY

# characters that do not change the parser state, outside and inside strings
_PLAIN = re.compile(r'[^"{}\[\],]*')
_STRING = re.compile(r'[^"\\]*')

_BLANKS = " \t\n\r"

_State = Literal["before", "inside", "complete", "broken"]


class ArgumentsEncoder:
    """Encodes the arguments of one call."""

    def __init__(self) -> None:
        self._state: _State = "before"
        self._member: list[str] = []  # pieces of the current member, or of all text after an error
        self._depth = 0  # the nesting depth within the member
        self._in_string = self._escaped = False
        self._has_members = False

    def feed(self, text: str) -> str:
        """Returns the members completed by this text, or "" if there are none."""
        sent, at = "", 0
        while at < len(text):
            match self._state:
                case "before":
                    at = self._open(text, at)
                case "inside":
                    at, member = self._scan(text, at)
                    sent += member
                case "broken":
                    self._member.append(text[at:])
                    break
                case "complete":
                    break
        return sent

    def flush(self, *, cut: bool) -> str:
        """Returns the end of the object. cut: whether the output ended within the call. If so, an
        incomplete member is omitted."""
        if self._state == "complete":
            return ""
        rest = "".join(self._member)
        begin = "" if self._has_members else "{"
        if cut or not rest.strip(_BLANKS):
            return f"{begin}}}"
        member = orjson.dumps({INVALID_ARGUMENTS_KEY: rest}).decode()
        return f", {member[1:]}" if self._has_members else member

    def _open(self, text: str, at: int) -> int:
        begun = text[at:].lstrip(_BLANKS)
        if not begun:
            return len(text)
        self._state = "inside" if begun[0] == "{" else "broken"
        return len(text) - len(begun) + (begun[0] == "{")

    def _scan(self, text: str, at: int) -> tuple[int, str]:
        """Scans to the next structural character. Returns the position after it, and the member
        that it completes."""
        plain = (_STRING if self._in_string else _PLAIN).match(text, at)
        assert plain is not None
        end = at if self._escaped else plain.end()
        self._member.append(text[at:end])
        if end == len(text):
            return end, ""
        character = text[end]
        if self._in_string:
            self._member.append(character)
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return end + 1, ""
        if not self._depth and character in ",}":
            return end + 1, self._end_member(character)
        self._member.append(character)
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        if self._depth < 0:
            self._state = "broken"
        return end + 1, ""

    def _end_member(self, character: str) -> str:
        member, closes = "".join(self._member), character == "}"
        if not (closes and not member.strip(_BLANKS)):
            if not _is_member(member):
                self._state = "broken"
                self._member.append(character)
                return ""
            sent = f"{',' if self._has_members else '{'}{member}"
            self._has_members = True
        else:
            sent = "" if self._has_members else "{"
        self._member = []
        if closes:
            self._state = "complete"
            sent += "}"
        return sent


def _is_member(text: str) -> bool:
    try:
        return len(orjson.loads(f"{{{text}}}")) == 1
    except orjson.JSONDecodeError:
        return False
