"""The operating system's side of a runner's process: how it begins, what it writes, how it ends.

Knows: processes, pipes, signals, a listening socket. Must not know: models, HTTP, jobs.

The socket is bound and listens here before there is a process, and this side of it stays open as
long as the process lives: nobody can take the port in between, a first request waits instead of
being refused, and when the process is dead there is still nobody else to talk to on it.

What a process wrote before it ended, and why it ended.

A process that answers one question and ends.

How a process of ours is begun: the same Python, the same packages.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.ports import FailureCause

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedChild:
    """stdout: what it wrote to standard output. status: its exit status, a signal being negative.
    reason: what it wrote to standard error that may say why it ended."""

    stdout: bytes
    status: int
    reason: str


async def run_module(
    module: str, input_line: bytes, limit: float, extra_env: Mapping[str, str] | None = None
) -> CompletedChild:
    """limit: seconds until the process is killed, which raises TimeoutError. extra_env: what its
    environment holds beside ours. Raises OSError where no process can be started."""
    process = await asyncio.create_subprocess_exec(
        *build_command(module),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**build_environment(), **(extra_env or {})},
        process_group=0,  # as in `app.runners.child_process`
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
    """What it writes until it ends; what it complains of is kept."""
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


# where our packages lie, wherever this process found them
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def build_command(module: str, *arguments: str) -> tuple[str, ...]:
    """What runs a module of ours. Nothing is looked for in the working directory (-P): people start
    servers where there is an `app` of theirs."""
    return (sys.executable, "-P", "-m", module, *arguments)


def build_environment() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{_PACKAGE_ROOT}{os.pathsep}{known}" if known else str(_PACKAGE_ROOT),
    }


log = logging.getLogger(__name__)

# connections that may wait until the process accepts them
_BACKLOG = 128

_CHUNK = 1 << 16

# seconds that a process gets to end in order, and that its last words may take
_TERMINATE_TIMEOUT, _OUTPUT_TIMEOUT = 5.0, 1.0

# Signals that come from outside: of an operator, or, SIGKILL, of a system that is out of memory.
_EXTERNAL_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """description: a clause. last_output: what it wrote that may say why; empty when it could not
    know. cause: as of `RunnerFailure`."""

    description: str
    last_output: str
    cause: FailureCause


def count_oom_kills() -> int | None:
    """How many processes this system has killed because memory ran out, in containers and out of
    them; None where it does not say (Documentation/admin-guide/mm of Linux, /proc/vmstat)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


class ChildProcess:
    """A process that was started. name: of the model, for the log and for `ps`."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, listener: socket.socket
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
        """make_init: the line that it gets through its standard input, made from the descriptor of
        the socket, which is the same in both processes."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.bind(("127.0.0.1", 0))
            listener.listen(_BACKLOG)
            first_line = make_init(listener.fileno()) + b"\n"
            process = await asyncio.create_subprocess_exec(
                *build_command("app.runners.worker_main", name),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
                # Ctrl-C at the terminal is for the parent, which ends its children in order. A
                # group of its own and not a session: see `lifeline`; and Linux shares processors
                # out by session (autogroups), so that on a busy machine one token in a hundred was
                # 0.1 s late from another session, and 0.02 s from this one.
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
    def port(self) -> int:
        return self._listener.getsockname()[1]

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def last_output(self) -> str:
        """What it wrote until now that may say why it is of no use any more."""
        return self._output.find_reason()

    async def wait(self) -> ProcessExit:
        """Returns when it has ended and left nothing behind. Any number may wait."""
        return await asyncio.shield(self._exit_task)

    def kill(self) -> None:
        """Also when it is stopped, or deaf."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def terminate(self) -> None:
        """In order, if that takes no longer than `_GRACE`."""
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
        # what is left in the pipe; a pipe that somebody else holds open is no reason to wait
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
        """Always on: a full pipe would stop the process."""
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
        """To our log, at its level. A line that names none and is not indented was not written by
        a logger: it is a library's complaint, or the last word of a process."""
        first, _, rest = line.partition(" ")
        if first in _LOG_LEVELS:
            level, line = getattr(logging, first), rest
        elif not line.startswith(" "):
            level = max(level, logging.WARNING)
        # what it says about being told to end is no news
        shown = logging.DEBUG if self._terminating else level
        if rate_limit.admit(now):
            if held := rate_limit.take_dropped():
                log.warning("%s: %d more lines were suppressed", self._name, held)
            log.log(shown, "%s: %s", self._name, line)
        return level
