"""Expressions in Lark, as llguidance has it (its docs/syntax.md), for texts, tokens and patterns.

Knows: how they are spelled. Must not know: what they are put together for.
"""

import json
import re
from collections.abc import Callable, Iterable

_TO_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)


class LiteralWriter:
    """A text → the expression that produces it; added tokens in it are produced as such."""

    def __init__(self, token: Callable[[str], int | None]) -> None:
        """token: the id of a text that is an added token."""
        self._token = token

    def __call__(self, text: str) -> str:
        expressions: list[str] = []
        rest = text
        while rest:
            at, size = self._next_token(rest)
            if at:
                expressions.append(quote(rest[:at]))
            if size:
                expressions.append(f"<[{self._token(rest[at : at + size])}]>")
            rest = rest[at + size :]
        return " ".join(expressions)

    def _next_token(self, text: str) -> tuple[int, int]:
        """Where the first marker that is a token begins, and how long it is; else the end, 0. No
        marker begins like a word: what was added besides markers mostly does."""
        for start, first in enumerate(text):
            if first.isalnum() or first.isspace():
                continue
            for end in range(len(text), start + 1, -1):
                if self._token(text[start:end]) is not None:
                    return start, end - start
        return len(text), 0


def join_alternatives(expressions: Iterable[str]) -> str:
    return " | ".join(f"({expression})" for expression in expressions)


def strip_literal_prefix(expression: str, spelled: str) -> str:
    """An expression, without the text that it begins with. spelled: that text, by
    `LiteralWriter`."""
    if spelled.startswith("<["):
        assert expression.startswith(spelled)
        return expression[len(spelled) :].lstrip()
    head = spelled[:-1]
    assert expression.startswith(head), f"{expression} does not begin with {spelled}"
    rest = f'"{expression[len(head) :]}'
    return rest.removeprefix('""').lstrip()


def quote(text: str) -> str:
    # the one character that may stand in JSON's strings as it is, and not in Lark's
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def escape_regex(text: str) -> str:
    """A text as a regular expression."""
    return "".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):x}}}" for c in text)


def regex_literal(pattern: str) -> str:
    """Between slashes, where a slash must be escaped and a line cannot end."""
    spelled = {"/": r"\/", "\n": r"\n"}
    inner = _TO_ESCAPE.sub(lambda found: spelled.get(found[0], found[0]), pattern)
    return f"/{inner}/"
