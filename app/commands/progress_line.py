"""A progress line that is overwritten in place, for work that takes seconds to minutes.

Knows: carriage returns, the width of the terminal. Must not know: the work. It uses no escape
sequences, and writes nothing to a stream that is not a terminal.
"""

import shutil
from typing import TextIO

from app.core.terminal import draw_bar

_BAR_WIDTH = 24

# a terminal without a known width
_FALLBACK_COLUMNS = 80


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
        line = " ".join([*parts, detail]).rstrip()
        columns = shutil.get_terminal_size((_FALLBACK_COLUMNS, 24)).columns
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
