"""The command in a pseudo-terminal: what a person sees, and their keys."""

import fcntl
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
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tests.server_process import ROOT, TIMEOUT, UNTRACED

ROWS = 40

# an escape sequence of ECMA-48: colours, cursor movements, titles
ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|.)")

# the keys that a terminal turns into a signal
CTRL_C, CTRL_D = b"\x03", b"\x04"


class TerminalProcess:
    """A running `mlxrunner` whose stdin, stdout and stderr are a terminal. output: everything that
    it has written so far. environ: additional variables; None removes one."""

    def __init__(
        self, *arguments: str, environ: Mapping[str, str | None] | None = None, columns: int = 120
    ) -> None:
        variables = {**os.environ, **UNTRACED, "TERM": "xterm-256color", **(environ or {})}
        for name in ("NO_COLOR", "FORCE_COLOR"):
            if name not in (environ or {}):
                variables.pop(name, None)
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", *arguments],
            cwd=ROOT,
            env={name: value for name, value in variables.items() if value is not None},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self._bytes = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._terminal)

    @property
    def output(self) -> str:
        return self._bytes.decode(errors="replace")

    @property
    def plain_output(self) -> str:
        """The output without escape sequences."""
        return ESCAPE.sub("", self.output)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Reads until a part of the plain output matches."""
        deadline = time.monotonic() + TIMEOUT
        while (found := re.search(pattern, self.plain_output)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in: {self.output}"
            assert self._read(), f"it ended without {pattern!r}: {self.output}"
        return found

    def press(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def wait_until_exit(self) -> int:
        """Reads the rest of the output and returns the exit status."""
        deadline = time.monotonic() + TIMEOUT
        while self._read():
            assert time.monotonic() < deadline, self.output
        return self.process.wait(TIMEOUT)

    def _read(self) -> bool:
        """Reads what is there, or waits for it a little. Returns False at the end."""
        if not select.select([self._terminal], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # on Linux, the end of a terminal is an error
            return False
        self._bytes += data
        return bool(data)
