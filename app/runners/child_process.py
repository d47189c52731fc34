"""Supervises child processes, logs their output, and reports why they exit.

Knows: processes, pipes, signals, a pair of connected sockets. Must not know: models, jobs, the
messages on the sockets.

`ChildProcess` is a model process. `run_module` runs a short-lived process that handles one request.
Both use the same Python interpreter and packages as this process.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.ports import FailureCause
from app.core.units import pluralize
from app.runners.channel import encode_frame
from app.runners.spawn import SpawnedProcess, build_command, build_environment

log = logging.getLogger(__name__)

# The maximum length of a line in bytes. The rest of a longer line is dropped.
_MAX_LINE_BYTES = 2000
# The number of output lines to keep, and the maximum length of an exit reason in characters.
_KEPT_LINES = 50
_MAX_REASON_CHARS = 2000
# The number of last lines to use as the exit reason if no line has an error marker.
_FALLBACK_LINES = 3

# Error markers of lines that explain an exit, as printed by Python, the C++ runtimes and MLX.
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

# The log rate limit: the maximum number of lines per window, and the window length in seconds.
_LINES_PER_WINDOW, _WINDOW = 100, 10.0

_CHUNK = 1 << 16

# The timeout in seconds for reading the last output.
_OUTPUT_TIMEOUT = 1.0

# Signals that other processes send. An operator may send any of these. The system sends SIGKILL
# when it is out of memory.
EXTERNAL_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class ProcessOutput:
    """Splits a byte stream into lines and keeps the last ones."""

    def __init__(self) -> None:
        self._partial = b""
        self._truncated = False  # whether the partial line exceeds the maximum length
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def feed(self, data: bytes) -> Iterator[str]:
        """Yields the lines completed by `data`. Unprintable characters are replaced, and empty
        lines are omitted."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield from self._end_line(end)
        self._extend(rest)

    def flush(self) -> Iterator[str]:
        """Yields the last line if it has no line terminator."""
        yield from self._end_line(b"")

    def find_reason(self) -> str:
        """Returns the kept lines with an error marker. If there are none, returns the last
        lines."""
        marked = [line for line in self._last_lines if any(word in line for word in _ERROR_MARKERS)]
        lines = dict.fromkeys(marked or list(self._last_lines)[-_FALLBACK_LINES:])
        return "; ".join(lines)[-_MAX_REASON_CHARS:]

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
    """Limits the number of logged lines per window, and counts dropped lines."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._passed = 0
        self._dropped = 0

    def admit(self, now: float) -> bool:
        """Returns whether a line may be logged. `now` is the monotonic time in seconds."""
        if now - self._since >= _WINDOW:
            self._since, self._passed = now, 0
        if self._passed == _LINES_PER_WINDOW:
            self._dropped += 1
            return False
        self._passed += 1
        return True

    def take_dropped(self) -> int:
        """Returns the number of lines dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped


def describe_exit(status: int) -> str:
    """Describes the exit of a process in a clause. `status` has the same meaning as in
    `subprocess`: negative for a signal."""
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL, possibly because the system ran out of memory"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"was killed by {name}"
    return f"ended with exit status {status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedChild:
    """The result of a process that has exited.

    stdout: the output of the process.
    status: the exit status; negative for a signal.
    reason: the lines of stderr that may explain the exit.
    """

    stdout: bytes
    status: int
    reason: str


async def run_module(
    module: str, message: object, limit: float, extra_env: Mapping[str, str] | None = None
) -> CompletedChild:
    """Runs a module in a child process, and waits for its exit.

    message: the message to write to stdin, in a frame; see `app.runners.channel`.
    limit: the timeout in seconds. On timeout, the process is killed and TimeoutError is raised.
    extra_env: additional environment variables.

    Raises OSError if the process cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *build_command(module),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**build_environment(), **(extra_env or {})},
        process_group=0,  # as in `spawn`
    )
    complaint = ProcessOutput()
    try:
        async with asyncio.timeout(limit):
            answer = await _communicate(process, encode_frame(message), complaint)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return CompletedChild(
        stdout=answer, status=process.returncode or 0, reason=complaint.find_reason()
    )


async def _communicate(process: Process, frame: bytes, stderr: ProcessOutput) -> bytes:
    """Returns the stdout of the process. Its stderr is passed to `stderr`."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame)
    try:
        answer, _, _ = await asyncio.gather(
            process.stdout.read(), _read_stderr(process, stderr), process.wait()
        )
    finally:
        process.stdin.close()
    return answer


async def _read_stderr(process: Process, stderr: ProcessOutput) -> None:
    assert process.stderr is not None
    while data := await process.stderr.read(_CHUNK):
        deque(stderr.feed(data), maxlen=0)
    deque(stderr.flush(), maxlen=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """The exit of a process.

    description: a clause that describes the exit.
    last_output: the lines of its output that may explain the exit; empty after SIGKILL.
    cause: see `RunnerFailure`.
    """

    description: str
    last_output: str
    cause: FailureCause


def count_oom_kills() -> int | None:
    """Returns the number of processes killed by the OOM killer, inside and outside containers
    (/proc/vmstat, Documentation/admin-guide/mm of Linux). Returns None if the number is unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


class ChildProcess:
    """A running model process, on the running event loop. `name` is the name of the model, which
    appears in the log. `channel_end` is this process's end of a pair of connected sockets, which
    the caller closes. The process exits when it is closed."""

    def __init__(self, name: str, spawned: SpawnedProcess) -> None:
        self._name = name
        self.channel_end = spawned.channel_end
        self._process = spawned.process
        self._loop = asyncio.get_running_loop()
        self._lines = ProcessOutput()
        self._rate_limit, self._log_level = LogRateLimit(), logging.WARNING
        self._output_ended = asyncio.Event()
        self._terminating = False
        self._oom_kills_at_start = count_oom_kills()
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._loop.add_reader(self._stdout, self._read_output)
        self._exit_status: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(
            target=self._wait_for_exit, name=f"waitpid-{self.pid}", daemon=True
        ).start()
        self._exit_task = asyncio.create_task(self._reap())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._exit_status.done()

    @property
    def last_output(self) -> str:
        """The lines of the output so far that may explain a failure."""
        return self._lines.find_reason()

    async def wait(self) -> ProcessExit:
        """Waits until the process has exited and its resources are closed. Several tasks may wait
        at the same time."""
        return await asyncio.shield(self._exit_task)

    def kill(self) -> None:
        """Sends SIGKILL, which also works for a stopped or hung process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def terminate(self, grace: float) -> None:
        """Closes the channel and waits for the exit. Kills the process after `grace` seconds."""
        self._terminating = True
        with contextlib.suppress(OSError):  # it is already closed
            self.channel_end.shutdown(socket.SHUT_RDWR)
        try:
            await asyncio.wait_for(self.wait(), grace)
        except TimeoutError:
            log.warning("%s: the process did not exit within %.0f s", self._name, grace)
            self.kill()
            await self.wait()

    def _wait_for_exit(self) -> None:
        """Runs on its own thread, because the process may have been started by any thread or
        before the event loop, and not every system notifies an event loop of its exit."""
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._set_exit_status, status)

    def _set_exit_status(self, status: int) -> None:
        if not self._exit_status.done():  # cancelled with the event loop
            self._exit_status.set_result(status)

    async def _reap(self) -> ProcessExit:
        status = await self._exit_status
        # Read the rest of the pipe with a timeout, because another process may still hold it open.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._output_ended.wait(), _OUTPUT_TIMEOUT)
        self._end_output()
        assert self._process.stdin is not None
        self._process.stdin.close()
        last_output = "" if status == -signal.SIGKILL else self._lines.find_reason()
        return ProcessExit(
            description=describe_exit(status),
            last_output=last_output,
            cause=self._classify_exit(status),
        )

    def _classify_exit(self, status: int) -> FailureCause:
        if -status not in EXTERNAL_SIGNALS:
            return "fault"
        before, now = self._oom_kills_at_start, count_oom_kills()
        if status == -signal.SIGKILL and (before is None or before != now):
            return "unknown"
        return "outside"

    def _read_output(self) -> None:
        """Reads the output of the process. All of it is read, because a full pipe would block the
        process."""
        try:
            data = os.read(self._stdout.fileno(), _CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        for line in self._lines.feed(data) if data else self._lines.flush():
            self._log_line(line)
        if not data:
            self._end_output()

    def _end_output(self) -> None:
        if not self._stdout.closed:
            self._loop.remove_reader(self._stdout)
            self._stdout.close()
            self._output_ended.set()

    def _log_line(self, line: str) -> None:
        """Logs a line at its own level.

        An unindented line without a level does not come from a logger. It was printed by a library
        or by a crashing process, and is logged as a warning. An indented line has the level of the
        previous line.
        """
        first, _, rest = line.partition(" ")
        if first in _LOG_LEVELS:
            self._log_level, line = getattr(logging, first), rest
        elif not line.startswith(" "):
            self._log_level = max(self._log_level, logging.WARNING)
        # After a requested exit, messages are logged only at the debug level.
        shown = logging.DEBUG if self._terminating else self._log_level
        if self._rate_limit.admit(self._loop.time()):
            if dropped := self._rate_limit.take_dropped():
                log.warning("%s: suppressed %s", self._name, pluralize(dropped, "more line"))
            log.log(shown, "%s: %s", self._name, line)
