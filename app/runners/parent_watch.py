"""Exits a child process when its parent process exits.

Knows: standard input, the parent's process ID, the kernel's support. Must not know: the purpose of
the process. The module is imported before modules that take long to import.

Standard input is a pipe whose other end only the parent holds. End-of-file therefore means that the
parent has exited, for any reason. A separate thread reads the pipe, independently of the other
threads. A stopped process (SIGSTOP) runs no thread. On Linux, the kernel kills it. On other
systems, it gets SIGHUP and SIGCONT, as every stopped process of an orphaned process group does
(POSIX.1-2024, exit()). This rule applies to a group in the session of the parent.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

# prctl(2)
_PR_SET_PDEATHSIG = 1

# When the system is out of memory, the kernel first kills the processes with the highest score.
# Each point, up to 1000, counts as a thousandth of the machine's memory
# (proc_pid_oom_score_adj(5)). A model process can be restarted, but the server process should
# survive.
_OOM_SCORE_ADJ = 500
_OOM_SCORE_ADJ_FILE = Path("/proc/self/oom_score_adj")

# The exit status of a process whose parent has exited.
_ORPHANED_STATUS = 3


def tie_to_parent() -> None:
    """On Linux, makes the kernel kill this process when its parent exits, and raises its OOM score.
    If the parent exits before this call, `exit_with_parent` detects it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError, ValueError):  # not writable on every system
        points = int(_OOM_SCORE_ADJ_FILE.read_text()) + _OOM_SCORE_ADJ
        _OOM_SCORE_ADJ_FILE.write_text(str(min(points, 1000)))


def read_first_line() -> bytes:
    """Returns the first line from the parent, which sends no other lines. Returns an empty line if
    the parent has exited."""
    line = bytearray()
    while not line.endswith(b"\n") and (data := os.read(0, 1 << 16)):
        line += data
    return bytes(line)


def exit_with_parent(parent_pid: int) -> None:
    """From now on, exits this process when the process `parent_pid` exits."""
    if os.getppid() != parent_pid:
        os._exit(_ORPHANED_STATUS)
    threading.Thread(target=_exit_at_stdin_eof, name="parent-watch", daemon=True).start()


def _exit_at_stdin_eof() -> None:
    # os.read is used instead of sys.stdin, because a thread that reads sys.stdin blocks the exit of
    # the interpreter.
    while os.read(0, 1 << 16):
        pass
    os._exit(_ORPHANED_STATUS)
