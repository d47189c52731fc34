"""Escapes text that clients or models chose, so that it can be shown on one line.

Knows: printable characters. Must not know: logs, terminals.
"""


def escape_control_characters(text: str) -> str:
    """Escapes unprintable characters, for example control characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
