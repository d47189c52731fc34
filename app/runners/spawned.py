"""The operating system's side of a runner's process: how it begins, what it writes, how it ends.

Knows: processes, pipes, signals, a listening socket. Must not know: models, HTTP, jobs.

The socket is bound and listens here before there is a process, and this side of it stays open as
long as the process lives: nobody can take the port in between, a first request waits instead of
being refused, and when the process is dead there is still nobody else to talk to on it.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.core.ports import FailureCause
from app.runners.interpreter import build_command, build_environment
from app.runners.output import LogRateLimit, ProcessOutput, describe_exit

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
                *build_command("app.runners.child", name),
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
