"""A process that must not outlive the one that started it.

Knows: standard input, the parent's pid, what the kernel offers. Must not know: what the process is
for. Imported before anything that takes time to import.

Standard input is a pipe whose other end only the parent holds, so that its end is the parent's
end, however that came. A thread reads it: it wakes up whatever else the process is at. A process
that is stopped (SIGSTOP) wakes up for nothing. On Linux the kernel kills it by itself; elsewhere it
gets SIGHUP and SIGCONT, as every stopped process does whose process group nobody is left to look
after (POSIX.1-2024, exit()), which holds for a group in the session of the parent.
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

# When memory runs out, the kernel prefers a process with more of these: up to a thousand, and a
# thousandth of the machine's memory each (proc_pid_oom_score_adj(5)). A runner can be started
# again; whoever starts it should stay.
_OOM_SCORE_ADJ = 500
_OOM_SCORE_ADJ_FILE = Path("/proc/self/oom_score_adj")

# of a process whose parent is gone; nobody is there to read it
_ORPHANED_STATUS = 3


def tie_to_parent() -> None:
    """The kernel's part, where it has one. What was missed before this call, `hold` finds out."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError, ValueError):  # not everywhere can it be written
        points = int(_OOM_SCORE_ADJ_FILE.read_text()) + _OOM_SCORE_ADJ
        _OOM_SCORE_ADJ_FILE.write_text(str(min(points, 1000)))


def read_first_line() -> bytes:
    """What the parent says before it falls silent; empty when it is gone already."""
    line = bytearray()
    while not line.endswith(b"\n") and (data := os.read(0, 1 << 16)):
        line += data
    return bytes(line)


def exit_with_parent(parent_pid: int) -> None:
    """From now on this process ends when `parent_pid` does, whatever else it is doing."""
    if os.getppid() != parent_pid:
        os._exit(_ORPHANED_STATUS)
    threading.Thread(target=_exit_at_stdin_eof, name="parent-watch", daemon=True).start()


def _exit_at_stdin_eof() -> None:
    # os.read and not sys.stdin: a thread inside the latter stops the interpreter from ending
    while os.read(0, 1 << 16):
        pass
    os._exit(_ORPHANED_STATUS)
