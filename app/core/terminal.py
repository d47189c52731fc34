"""What a terminal can show: color, a line that is rewritten, its width.

Knows: the environment variables and escape sequences of terminals. Must not know: what is shown.

Color follows https://no-color.org and https://force-color.org, with Python's own precedence
(PYTHON_COLORS aside): NO_COLOR, then FORCE_COLOR, then TERM=dumb, then whether it is a terminal.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TextIO

from app.core.errors import escape_control_characters

Color = Literal["red", "green", "yellow", "cyan", "dim", "bold"]

_CODES: Mapping[Color, int] = {
    "bold": 1,
    "dim": 2,
    "red": 31,
    "green": 32,
    "yellow": 33,
    "cyan": 36,
}

# of a terminal without a known width
_DEFAULT_WIDTH = 80

# a command in a message, which a reader copies
_QUOTED = re.compile(r"`[^`\n]*`")

_BAR_WIDTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTerminal:
    """is_terminal: whether a person reads it. has_color: whether it shows color. can_rewrite:
    whether a line that was written can be erased."""

    is_terminal: bool = False
    has_color: bool = False
    can_rewrite: bool = False

    def paint(self, text: str, color: Color) -> str:
        """Returns the text in a color, or unchanged without color. text: without escape
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


def wrap_words(text: str, stream: TextIO) -> str:
    """Breaks lines that are wider than the terminal at words, and indents the lines that follow.
    Text in backticks is not broken. In a pipe or a file, the text remains unchanged."""
    if not stream.isatty():
        return text
    try:
        width = get_width(stream.fileno())
    except OSError:  # a stream without a descriptor
        width = _DEFAULT_WIDTH
    wrapper = textwrap.TextWrapper(
        width=max(width - 1, 20),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    # the wrapper does not break lines at this character
    whole = _QUOTED.sub(lambda found: found[0].replace(" ", "\0"), text)
    lines = [wrapper.fill(line) for line in whole.split("\n")]
    return "\n".join(lines).replace("\0", " ")


def print_message(text: str) -> None:
    """Prints a message of a command on stderr, such as an error. It may contain the names and texts
    of files, which could control the terminal."""
    line = f"mlxrunner: {escape_control_characters(text)}"
    print(wrap_words(line, sys.stderr), file=sys.stderr, flush=True)


def erase_line(width: int) -> str:
    """Returns the text that erases the line and moves to its beginning. It contains no escape
    sequence, so it also works on dumb terminals and with NO_COLOR. width: the width of the
    terminal."""
    return f"\r{' ' * (width - 1)}\r"


def draw_bar(done: float, total: float, width: int = 20) -> str:
    """Draws a progress bar."""
    filled = int(width * min(max(done / max(total, 1e-9), 0), 1))
    return "[" + "#" * filled + "." * (width - filled) + "]"


class ProgressLine:
    """One line of a stream. It is erased before other output is written."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._shown = ""

    def show(self, label: str, done: float | None = None, detail: str = "") -> None:
        """Shows a label, a bar and a detail. done: the share from 0 to 1; None shows no bar."""
        if not self._is_terminal:
            return
        parts = [label]
        if done is not None:
            parts.append(f"{draw_bar(done, 1, _BAR_WIDTH)} {100 * done:3.0f} %")
        line = escape_control_characters(" ".join([*parts, detail]).rstrip())
        columns = shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns
        line = line[: max(columns - 1, 1)]
        if line != self._shown:
            self._write(line)

    def erase(self) -> None:
        if self._shown:
            self._write("")
            self._out.write("\r")
            self._out.flush()

    def _write(self, line: str) -> None:
        self._out.write(f"\r{line:<{len(self._shown)}}")
        self._out.flush()
        self._shown = line
