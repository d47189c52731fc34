"""What a terminal can show: colour, a line that is rewritten, its width.

Knows: the environment variables and escape sequences of terminals. Must not know: what is shown.

Colour follows https://no-color.org and https://force-color.org, with Python's own precedence
(PYTHON_COLORS aside): NO_COLOR, then FORCE_COLOR, then TERM=dumb, then whether it is a terminal.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TextIO

Color = Literal["red", "green", "yellow", "cyan", "dim", "bold"]

_CODES: Mapping[Color, int] = {
    "bold": 1,
    "dim": 2,
    "red": 31,
    "green": 32,
    "yellow": 33,
    "cyan": 36,
}

_DEFAULT_WIDTH = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTerminal:
    """is_terminal: whether a person reads it. has_color: whether it shows colour. can_rewrite:
    whether a line that was written can be erased."""

    is_terminal: bool = False
    has_color: bool = False
    can_rewrite: bool = False

    def paint(self, text: str, color: Color) -> str:
        """Returns the text in a colour, or unchanged without colour. text: without escape
        sequences."""
        return f"\x1b[{_CODES[color]}m{text}\x1b[0m" if self.has_color and text else text


def detect_terminal(stream: TextIO, environ: Mapping[str, str]) -> OutputTerminal:
    is_terminal = stream.isatty()
    is_dumb = environ.get("TERM") == "dumb"
    has_color = is_terminal and not is_dumb
    if environ.get("NO_COLOR"):
        has_color = False
    elif environ.get("FORCE_COLOR"):
        has_color = True
    return OutputTerminal(
        is_terminal=is_terminal, has_color=has_color, can_rewrite=is_terminal and not is_dumb
    )


def get_width(descriptor: int) -> int:
    """Returns the number of columns of the terminal."""
    try:
        return os.get_terminal_size(descriptor).columns or _DEFAULT_WIDTH
    except OSError:
        return _DEFAULT_WIDTH


def erase_line(width: int) -> str:
    """Returns the text that erases the line and moves to its begin. It has no escape sequence, so
    that NO_COLOR and dumb terminals need no other way. width: of the terminal."""
    return f"\r{' ' * (width - 1)}\r"


def draw_bar(done: float, total: float, width: int = 20) -> str:
    """Draws a progress bar."""
    filled = int(width * min(max(done / max(total, 1e-9), 0), 1))
    return "[" + "#" * filled + "." * (width - filled) + "]"
