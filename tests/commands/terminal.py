"""`mlxrunner` in a pseudo-terminal, which turns typed control characters into signals."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.server_process import ROOT, TIMEOUT, UNTRACED

CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"

ROWS, COLUMNS = 40, 120

# makes the terminal the controlling one of a new session, then becomes the command
_LAUNCHER = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


class Terminal:
    """A command that runs in a terminal. output: everything that it has written."""

    def __init__(self, process: "subprocess.Popen[bytes]", side: int) -> None:
        self.process = process
        self._side = side
        self._output = bytearray()
        self._seen = 0

    @property
    def output(self) -> str:
        return self._output.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def read_until(self, text: str) -> str:
        """Waits until the output since the last call contains the text, and returns that part."""
        deadline = time.monotonic() + 2 * TIMEOUT
        while (found := self._output.find(text.encode(), self._seen)) < 0:
            assert time.monotonic() < deadline, self.output[-4000:]
            assert self._read() or self.process.poll() is None, self.output[-4000:]
        begin, self._seen = self._seen, found + len(text.encode())
        return self._output[begin : self._seen].decode(errors="replace")

    def wait_for_prompt(self, text: str) -> None:
        """Waits until the output contains the text and the command waits for input. Python notices
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

    def _read(self) -> bool:
        """Reads what is there, or waits a moment. Returns whether there was anything."""
        readable, _, _ = select.select([self._side], [], [], 0.1)
        if not readable:
            return False
        try:
            data = os.read(self._side, 1 << 16)
        except OSError:  # EIO: the command has closed the terminal
            return False
        self._output += data
        return bool(data)


@contextlib.contextmanager
def open_terminal(
    *arguments: str, environ: Mapping[str, str], folder: Path = ROOT
) -> Iterator[Terminal]:
    """Runs `mlxrunner` with these arguments in a terminal. Kills it at the end, if it still runs.
    environ: replaces the environment, except for the type of the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, "-m", "app", *arguments],
        cwd=folder,
        env={"TERM": "xterm-256color", **UNTRACED, **environ},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)
