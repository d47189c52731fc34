"""A program in a terminal, for those that continue a conversation only there."""

import contextlib
import fcntl
import itertools
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.server_process import TIMEOUT

ROWS, COLUMNS = 40, 120

# the number of pauses in which Enter is pressed before the line is typed again
ENTER_PRESSES = 10


def type_until(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    text: str,
    is_sent: Callable[[], bool],
    is_done: Callable[[], bool],
) -> str:
    """Run the program in a terminal, type a line, and end the program when it is done. Returns the
    output.

    is_sent: whether the program has sent the line. The line is typed and Enter is pressed until
    then, because a program that starts may discard its input or ignore the key.
    """
    output = bytearray()
    with _start(command, environment, folder) as terminal:
        _read_until(terminal, output, is_sent, type_line=text.encode())
        _read_until(terminal, output, is_done)
    return output.decode(errors="replace")


@contextlib.contextmanager
def _start(command: list[str], environment: Mapping[str, str], folder: Path) -> Iterator[int]:
    """Yields our end of the terminal. Kills the program's process group at the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    try:
        yield ours
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)
        os.close(theirs)


def _read_until(
    terminal: int, output: bytearray, condition: Callable[[], bool], type_line: bytes = b""
) -> None:
    """Read the output until the condition is true. type_line: typed in a pause of the output, and
    followed by Enter in each of the next ones."""
    deadline = time.monotonic() + 4 * TIMEOUT
    keys = itertools.cycle([type_line, *[b"\r"] * ENTER_PRESSES])
    while not condition():
        assert time.monotonic() < deadline, output.decode(errors="replace")[-4000:]
        readable, _, _ = select.select([terminal], [], [], 1.0)
        if readable:
            output += os.read(terminal, 1 << 16)
        elif type_line:
            os.write(terminal, next(keys))
