"""Lark expressions for texts, tokens and patterns, in llguidance's dialect (its docs/syntax.md).

Knows: the syntax of the expressions. Must not know: the grammars that contain them.
"""

import json
import re
from collections.abc import Callable, Iterable

_TO_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)


class LiteralWriter:
    """Converts a text to an expression that matches it. Added tokens in the text match as
    tokens."""

    def __init__(self, token: Callable[[str], int | None]) -> None:
        """token: returns the ID of a text if the text is an added token."""
        self._token = token

    def __call__(self, text: str) -> str:
        expressions: list[str] = []
        rest = text
        while rest:
            position, size = self._next_token(rest)
            if position:
                expressions.append(quote(rest[:position]))
            if size:
                expressions.append(f"<[{self._token(rest[position : position + size])}]>")
            rest = rest[position + size :]
        return " ".join(expressions)

    def _next_token(self, text: str) -> tuple[int, int]:
        """Returns (start, length) of the first marker that is a token, or (end, 0) if there is
        none. Markers, unlike most other added tokens, never start with a letter, a digit or white
        space."""
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
    """Removes the literal at the start of an expression. spelled: the literal in the form written
    by `LiteralWriter`."""
    if spelled.startswith("<["):
        assert expression.startswith(spelled)
        return expression[len(spelled) :].lstrip()
    head = spelled[:-1]
    assert expression.startswith(head), f"{expression} does not begin with {spelled}"
    rest = f'"{expression[len(head) :]}'
    return rest.removeprefix('""').lstrip()


def quote(text: str) -> str:
    # the only character that is allowed unescaped in JSON strings but not in Lark strings
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def escape_regex(text: str) -> str:
    """Returns a regular expression that matches the text."""
    return "".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):x}}}" for c in text)


def regex_literal(pattern: str) -> str:
    """Returns the pattern between slashes, with slashes and line breaks escaped."""
    spelled = {"/": r"\/", "\n": r"\n"}
    inner = _TO_ESCAPE.sub(lambda found: spelled.get(found[0], found[0]), pattern)
    return f"/{inner}/"
