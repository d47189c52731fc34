"""A program in a pseudo-terminal: what a person sees, and their keys.

The terminal is the controlling one of a new session, so it turns typed control characters into
signals.
"""

import fcntl
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.server_process import ROOT, TIMEOUT, UNTRACED

CTRL_C, CTRL_D, CTRL_U, ENTER = "\x03", "\x04", "\x15", "\r"

TERMINAL_TYPE = "xterm-256color"

ROWS, COLUMNS = 40, 120

# an escape sequence of ECMA-48: colours, cursor movements, titles
ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|.)")

# the number of pauses in which Enter is pressed before the line is typed again
ENTER_PRESSES = 10

# makes the terminal the controlling one of the new session, then becomes the program; a shell that
# runs the tests in the background ignores SIGINT, which child processes inherit
_LAUNCHER = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
)


def make_environ(**variables: str) -> dict[str, str]:
    """The environment of this process in a terminal with colour, changed by these variables."""
    others = ("NO_COLOR", "FORCE_COLOR", "TERM")
    kept = {name: value for name, value in os.environ.items() if name not in others}
    return {**kept, **variables}


class TerminalProcess:
    """A running program whose stdin, stdout and stderr are a terminal. environ: replaces the
    environment, except for the type of the terminal. columns: the width of the terminal."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        environ: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        columns: int = COLUMNS,
    ) -> None:
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        variables = make_environ() if environ is None else environ
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, *map(str, command)],
            cwd=folder,
            env={"TERM": TERMINAL_TYPE, **UNTRACED, **variables},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._output = bytearray()
        self._seen = 0
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._terminal)

    @property
    def output(self) -> str:
        """Everything that was written so far."""
        return self._output.decode(errors="replace")

    @property
    def plain_output(self) -> str:
        """The output without escape sequences."""
        return ESCAPE.sub("", self.output)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def paste(self, text: str) -> None:
        """Pastes as a terminal does: in bracketed paste mode, which the program has to enable, the
        text is marked."""
        switches = re.findall(r"\x1b\[\?2004([hl])", self.output)
        is_bracketed = bool(switches) and switches[-1] == "h"
        pasted = text.replace("\n", ENTER)
        self.type(f"\x1b[200~{pasted}\x1b[201~" if is_bracketed else pasted)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Reads until a part of the plain output matches."""
        deadline = time.monotonic() + 2 * TIMEOUT
        while (found := re.search(pattern, self.plain_output)) is None:
            self._read_before(deadline)
        return found

    def read_until(self, text: str) -> str:
        """Reads until the output since the last call contains the text, and returns that part."""
        deadline = time.monotonic() + 2 * TIMEOUT
        while (found := self._output.find(text.encode(), self._seen)) < 0:
            self._read_before(deadline)
        begin, self._seen = self._seen, found + len(text.encode())
        return self._output[begin : self._seen].decode(errors="replace")

    def read_while(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 4 * TIMEOUT
        while condition():
            self._read_before(deadline)

    def type_until(self, line: str, is_sent: Callable[[], bool]) -> None:
        """Types a line, and presses Enter whenever the output pauses, until the program has sent
        the line. A program that starts may discard its input or ignore the key."""
        deadline = time.monotonic() + 4 * TIMEOUT
        keys = itertools.cycle([line, *[ENTER] * ENTER_PRESSES])
        while not is_sent():
            if not self._read_before(deadline, seconds=1.0):
                self.type(next(keys))

    def wait_for_prompt(self, text: str) -> None:
        """Reads until the output contains the text and the program waits for input. Python notices
        a signal at a prompt only while it waits: one that arrives a moment earlier is handled with
        the next key."""
        self.read_until(text)
        stat = Path(f"/proc/{self.process.pid}/stat")
        asleep = 0
        while asleep < 5:
            time.sleep(0.02)
            is_asleep = not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "S"
            asleep = asleep + 1 if is_asleep else 0

    def wait(self) -> int:
        """Reads the rest of the output and returns the exit status."""
        deadline = time.monotonic() + 2 * TIMEOUT
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output[-4000:]
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def _read_before(self, deadline: float, seconds: float = 0.1) -> bool:
        """Like `_read`, while the program runs and until the deadline."""
        assert time.monotonic() < deadline, self.output[-4000:]
        has_read = self._read(seconds)
        assert not self._has_ended, f"the program has ended: {self.output[-4000:]}"
        return has_read

    def _read(self, seconds: float = 0.1) -> bool:
        """Reads what is there, or waits for it. Returns whether there was anything."""
        if self._has_ended or not select.select([self._terminal], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # on Linux, the end of a terminal is an error
            data = b""
        self._output += data
        self._has_ended = not data
        return bool(data)


def open_terminal(
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    columns: int = COLUMNS,
) -> TerminalProcess:
    """Runs `mlxrunner` with these arguments in a terminal. Use it as a context manager, which kills
    it at the end if it still runs."""
    command = [sys.executable, "-m", "app", *arguments]
    return TerminalProcess(command, environ=environ, folder=folder, columns=columns)
