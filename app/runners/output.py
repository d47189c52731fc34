"""What a process wrote before it ended, and why it ended.

Knows: bytes, lines, exit statuses. Must not know: pipes, processes, logging. Whatever a process
writes, and how much of it, what is kept is bounded.
"""

import signal
from collections import deque
from collections.abc import Iterator

# bytes of one line; the rest of it is dropped
_MAX_LINE_BYTES = 2000
# lines that are kept, and characters of them that are told
_KEPT_LINES = 50
_MAX_REASON_CHARS = 2000
# lines that are told where none gives a reason
_FALLBACK_LINES = 3

# what a line has in it that says why a process ends: of Python, of the C++ runtimes, of MLX
_ERROR_MARKERS = (
    "Error:",
    "error:",
    "Fatal Python error",
    "MemoryError",
    "terminate called",
    "terminating",
    "what():",
    "Assertion",
    "panic",
    "out of memory",
    "Unable to allocate",
    "cannot allocate",
)

# lines that are passed on within so many seconds
_LINES_PER_WINDOW, _WINDOW = 100, 10.0


class ProcessOutput:
    """The lines of a stream of bytes, and the last of them."""

    def __init__(self) -> None:
        self._partial = b""
        self._truncated = False  # whether the partial line is longer than is kept
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that `data` completes, printable and none of them empty."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield from self._end_line(end)
        self._extend(rest)

    def flush(self) -> Iterator[str]:
        """The last line, where nothing ended it."""
        yield from self._end_line(b"")

    def find_reason(self) -> str:
        """What it had to say for itself: lines that give a reason, else the last ones."""
        telling = [
            line for line in self._last_lines if any(word in line for word in _ERROR_MARKERS)
        ]
        told = dict.fromkeys(telling or list(self._last_lines)[-_FALLBACK_LINES:])
        return "; ".join(told)[-_MAX_REASON_CHARS:]

    def _extend(self, data: bytes) -> None:
        room = _MAX_LINE_BYTES - len(self._partial)
        self._truncated = self._truncated or len(data) > room
        self._partial += data[:room]

    def _end_line(self, data: bytes) -> Iterator[str]:
        self._extend(data)
        text = self._partial.decode("utf-8", "replace").expandtabs().rstrip()
        text = "".join(c if c.isprintable() else "\ufffd" for c in text)
        line = f"{text} …" if self._truncated else text
        self._partial, self._truncated = b"", False
        if line:
            self._last_lines.append(line)
            yield line


class LogRateLimit:
    """Lets so many lines through in a while, and counts the others."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._passed = 0
        self._dropped = 0

    def admit(self, now: float) -> bool:
        """now: seconds, never less than before."""
        if now - self._since >= _WINDOW:
            self._since, self._passed = now, 0
        if self._passed == _LINES_PER_WINDOW:
            self._dropped += 1
            return False
        self._passed += 1
        return True

    def take_dropped(self) -> int:
        """How many were not let through since this was last asked."""
        held, self._dropped = self._dropped, 0
        return held


def describe_exit(status: int) -> str:
    """How a process ended, as a clause. status: as `subprocess` has it, a signal being negative."""
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL, possibly because the system ran out of memory"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"was killed by {name}"
    return f"ended with exit status {status}"
