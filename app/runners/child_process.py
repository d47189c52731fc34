"""Starts child processes, logs their output and reports why they exit.

Knows: processes, pipes, signals, a listening socket. Must not know: models, HTTP, jobs.

`ChildProcess` is the process of a model, `run_module` runs a short-lived process that handles one
request. Both use the Python and the packages of this process.

The socket of a `ChildProcess` is a Unix socket in a directory that only this user can open. It is
bound and listening before the process exists, so a first request waits instead of being refused.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.ports import FailureCause

# maximum bytes of a line; the rest is dropped
_MAX_LINE_BYTES = 2000
# lines that are kept, and maximum characters of an exit reason
_KEPT_LINES = 50
_MAX_REASON_CHARS = 2000
# last lines used as the reason if no line has an error marker
_FALLBACK_LINES = 3

# markers of lines that explain an exit: of Python, of the C++ runtimes, of MLX
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

# maximum number of lines logged per window, and the window in seconds
_LINES_PER_WINDOW, _WINDOW = 100, 10.0


class ProcessOutput:
    """Splits a byte stream into lines and keeps the last ones."""

    def __init__(self) -> None:
        self._partial = b""
        self._truncated = False  # whether the partial line exceeds the maximum length
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def feed(self, data: bytes) -> Iterator[str]:
        """Yields the lines that `data` completes: printable text, without empty lines."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield from self._end_line(end)
        self._extend(rest)

    def flush(self) -> Iterator[str]:
        """Yields the last line if it has no line end."""
        yield from self._end_line(b"")

    def find_reason(self) -> str:
        """The kept lines with an error marker, else the last lines."""
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
    """Limits the number of logged lines per window, and counts the dropped ones."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._passed = 0
        self._dropped = 0

    def admit(self, now: float) -> bool:
        """Whether a line may be logged. now: monotonic time in seconds."""
        if now - self._since >= _WINDOW:
            self._since, self._passed = now, 0
        if self._passed == _LINES_PER_WINDOW:
            self._dropped += 1
            return False
        self._passed += 1
        return True

    def take_dropped(self) -> int:
        """The number of lines dropped since the last call."""
        held, self._dropped = self._dropped, 0
        return held


def describe_exit(status: int) -> str:
    """How a process ended, as a clause. status: as in `subprocess`; negative for a signal."""
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
    """stdout: output of the process. status: exit status; negative for a signal. reason: lines of
    its standard error that may explain the exit."""

    stdout: bytes
    status: int
    reason: str


async def run_module(
    module: str, input_line: bytes, limit: float, extra_env: Mapping[str, str] | None = None
) -> CompletedChild:
    """Runs a module in a child process, and waits for its exit.

    input_line: line to write to its standard input. limit: seconds until the process is killed,
    which raises TimeoutError. extra_env: variables added to this process's environment. Raises
    OSError if the process cannot be started."""
    process = await asyncio.create_subprocess_exec(
        *build_command(module),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**build_environment(), **(extra_env or {})},
        process_group=0,  # as in `ChildProcess.start`
    )
    complaint = ProcessOutput()
    try:
        async with asyncio.timeout(limit):
            answer = await _communicate(process, input_line, complaint)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return CompletedChild(
        stdout=answer, status=process.returncode or 0, reason=complaint.find_reason()
    )


async def _communicate(process: Process, input_line: bytes, stderr: ProcessOutput) -> bytes:
    """Returns the standard output of the process; its standard error goes to `stderr`."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(input_line + b"\n")
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


# the folder of the packages `app` and `models`
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def build_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module. -P keeps the working directory off sys.path: users start
    servers in folders that have an `app` of their own."""
    return (sys.executable, "-P", "-m", module, *arguments)


def build_environment() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{_PACKAGE_ROOT}{os.pathsep}{known}" if known else str(_PACKAGE_ROOT),
    }


log = logging.getLogger(__name__)

# connections that may wait to be accepted
_BACKLOG = 128

# of the directory of a socket, before the process id of the server
_SOCKET_PREFIX = "mlxrunner-"

# A path of a Unix socket has at most 103 bytes on macOS, 107 on Linux.
_MAX_DIRECTORY_BYTES = 60

_CHUNK = 1 << 16

# seconds for an orderly exit, and for reading the last output
_TERMINATE_TIMEOUT, _OUTPUT_TIMEOUT = 5.0, 1.0

# Signals that other processes send: an operator's, or SIGKILL from a system that is out of memory.
_EXTERNAL_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """description: how the process ended, as a clause. last_output: lines of its output that may
    explain the exit; empty after SIGKILL. cause: as in `RunnerFailure`."""

    description: str
    last_output: str
    cause: FailureCause


def count_oom_kills() -> int | None:
    """The number of processes that the system has killed because it was out of memory, inside and
    outside containers (/proc/vmstat, Documentation/admin-guide/mm of Linux); None if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


class PrivateSocket:
    """A listening Unix socket in a directory of its own, which only this user can enter. Raises
    OSError if it cannot be created."""

    def __init__(self) -> None:
        _remove_stale_sockets()
        # mkdtemp makes it with mode 0700
        prefix = f"{_SOCKET_PREFIX}{os.getpid()}-"
        self._directory = Path(tempfile.mkdtemp(prefix=prefix, dir=_socket_directory()))
        self.path = self._directory / "worker"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(self.path))
            self._socket.listen(_BACKLOG)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _socket_directory() -> Path:
    """The temporary directory, or /tmp if the path of a socket in it would be too long."""
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= _MAX_DIRECTORY_BYTES else "/tmp")


def _remove_stale_sockets() -> None:
    """Removes the directories of servers that were killed before they could."""
    for directory in _socket_directory().glob(f"{_SOCKET_PREFIX}*-*"):
        pid = directory.name.removeprefix(_SOCKET_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if directory.lstat().st_uid == os.getuid() and not _is_alive(pid):
                shutil.rmtree(directory, ignore_errors=True)


def _is_alive(pid: str) -> bool:
    """Whether a process of this id exists; True if it cannot be found out."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        return True
    return True


class ChildProcess:
    """A running model process. name: name of the model, for the log and for `ps`."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, listener: "PrivateSocket"
    ) -> None:
        self._name = name
        self._process = process
        self._listener = listener
        self._output = ProcessOutput()
        self._terminating = False
        self._oom_kills_at_start = count_oom_kills()
        self._output_task = asyncio.create_task(self._read_output())
        self._exit_task = asyncio.create_task(self._reap())

    @classmethod
    async def start(cls, name: str, make_init: Callable[[int], bytes]) -> "ChildProcess":
        """Starts the process.

        make_init: returns the first line of its standard input, given the descriptor of the
        socket, which is the same in both processes."""
        listener = PrivateSocket()
        try:
            first_line = make_init(listener.fileno()) + b"\n"
            process = await asyncio.create_subprocess_exec(
                *build_command("app.runners.worker_main", name),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
                # Ctrl-C at the terminal must reach only the parent, which stops its children in
                # order. A separate process group, not a session: see `parent_watch`. Also, Linux
                # schedules by session (autogroups): on a busy machine, one token in a hundred was
                # 0.1 s late from a separate session, and 0.02 s from the same one.
                process_group=0,
                env=build_environment(),
            )
        except BaseException:
            listener.close()
            raise
        spawned = cls(name, process, listener)
        assert process.stdin is not None
        process.stdin.write(first_line)
        return spawned

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def socket_path(self) -> Path:
        return self._listener.path

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def last_output(self) -> str:
        """Lines of its output so far that may explain a failure."""
        return self._output.find_reason()

    async def wait(self) -> ProcessExit:
        """Waits until the process has exited and its resources are closed. Any number of tasks may
        wait."""
        return await asyncio.shield(self._exit_task)

    def kill(self) -> None:
        """Sends SIGKILL, which also ends a stopped or hung process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def terminate(self) -> None:
        """Sends SIGINT and waits for the exit; kills the process after `_TERMINATE_TIMEOUT`."""
        self._terminating = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(self.wait(), _TERMINATE_TIMEOUT)
        except TimeoutError:
            log.warning(
                "%s: the process did not exit within %.0f s", self._name, _TERMINATE_TIMEOUT
            )
            self.kill()
            await self.wait()

    async def _reap(self) -> ProcessExit:
        status = await self._process.wait()
        # read the rest of the pipe, with a timeout: another process may still hold it open
        await asyncio.wait({self._output_task}, timeout=_OUTPUT_TIMEOUT)
        self._output_task.cancel()
        await asyncio.gather(self._output_task, return_exceptions=True)
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(OSError):
            await self._process.stdin.wait_closed()
        self._listener.close()
        said = "" if status == -signal.SIGKILL else self._output.find_reason()
        return ProcessExit(
            description=describe_exit(status), last_output=said, cause=self._classify_exit(status)
        )

    def _classify_exit(self, status: int) -> FailureCause:
        if -status not in _EXTERNAL_SIGNALS:
            return "fault"
        before, now = self._oom_kills_at_start, count_oom_kills()
        if status == -signal.SIGKILL and (before is None or before != now):
            return "unknown"
        return "outside"

    async def _read_output(self) -> None:
        """Reads all output of the process; a full pipe would block it."""
        stream = self._process.stdout
        assert stream is not None
        quota, level = LogRateLimit(), logging.WARNING
        now = asyncio.get_running_loop().time
        while data := await stream.read(_CHUNK):
            for line in self._output.feed(data):
                level = self._log_line(line, level, quota, now())
        for line in self._output.flush():
            level = self._log_line(line, level, quota, now())

    def _log_line(self, line: str, level: int, rate_limit: LogRateLimit, now: float) -> int:
        """Logs a line at its own level and returns the level.

        A line without a level that is not indented was not written by a logger: it is a message of
        a library, or the last output of a crashing process, and is logged as a warning."""
        first, _, rest = line.partition(" ")
        if first in _LOG_LEVELS:
            level, line = getattr(logging, first), rest
        elif not line.startswith(" "):
            level = max(level, logging.WARNING)
        # messages about the requested exit are not of interest
        shown = logging.DEBUG if self._terminating else level
        if rate_limit.admit(now):
            if held := rate_limit.take_dropped():
                log.warning("%s: %d more lines were suppressed", self._name, held)
            log.log(shown, "%s: %s", self._name, line)
        return level
