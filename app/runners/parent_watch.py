"""Exits a child process when its parent process exits.

Knows: standard input, the parent's process ID, the kernel's support. Must not know: the purpose of
the process. This module is imported before modules with a long import time.

Stdin is a pipe whose other end is held only by the parent. EOF therefore means that the parent has
exited, for whatever reason. A separate thread reads the pipe. In a stopped process (SIGSTOP), no
thread runs: on Linux, the kernel kills the process; on other systems, it gets SIGHUP and SIGCONT,
like every stopped process in an orphaned process group (POSIX.1-2024, exit()). This requires that
the process group is in the parent's session.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

# prctl(2)
_PR_SET_PDEATHSIG = 1

# The OOM score adjustment. When the system is out of memory, the kernel first kills the processes
# with the highest score. Each point, up to 1000, counts as 0.1 % of the machine's memory
# (proc_pid_oom_score_adj(5)). A model process can be restarted, but the server process should
# survive.
_OOM_SCORE_ADJ = 500
_OOM_SCORE_ADJ_FILE = Path("/proc/self/oom_score_adj")

# The exit status of a process whose parent has exited.
_ORPHANED_STATUS = 3


def tie_to_parent() -> None:
    """On Linux, makes the kernel kill this process when its parent exits, and raises the OOM score.
    If the parent exits before this call, `exit_with_parent` detects it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError, ValueError):  # not writable on every system
        points = int(_OOM_SCORE_ADJ_FILE.read_text()) + _OOM_SCORE_ADJ
        _OOM_SCORE_ADJ_FILE.write_text(str(min(points, 1000)))


def exit_with_parent(parent_pid: int, before_exit: Callable[[], None] = lambda: None) -> None:
    """Exits this process as soon as the process `parent_pid` exits. `before_exit` is called before
    that, on another thread. On Linux, the kernel may kill the process before the call."""
    if os.getppid() != parent_pid:
        os._exit(_ORPHANED_STATUS)
    threading.Thread(
        target=_exit_at_stdin_eof, args=(before_exit,), name="parent-watch", daemon=True
    ).start()


def _exit_at_stdin_eof(before_exit: Callable[[], None]) -> None:
    # os.read is used instead of sys.stdin, because a thread that reads sys.stdin blocks the exit of
    # the interpreter.
    while os.read(0, 1 << 16):
        pass
    before_exit()
    os._exit(_ORPHANED_STATUS)
