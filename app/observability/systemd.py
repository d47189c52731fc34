"""State notifications for the system's service manager: sd_notify(3) of systemd.

Knows: the variables and messages of that protocol. Must not know: uvicorn, requests.

    READY=1       when the server listens
    WATCHDOG=1    while the event loop runs
    STOPPING=1    when the server drains, with the maximum duration

If the environment variables are not set, nothing is sent. The main purpose is the watchdog. A hung
HTTP process cannot report this over HTTP, and the engine watchdog covers only engines.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, MutableMapping
from typing import Protocol, Self

log = logging.getLogger(__name__)

# The interval in seconds at which the server is polled, and the margin in seconds between the end
# of a drain and the stop timeout.
_POLL_SECONDS = 0.25
_STOP_MARGIN_SECONDS = 30.0


class ServerFlags(Protocol):
    """The state to report, read from attributes of uvicorn's server. started: whether the server
    listens. should_exit: whether the server is stopping."""

    started: bool
    should_exit: bool


class SystemdNotifier:
    """Sends notifications. address: the address of a datagram socket; a leading @ means an abstract
    socket, and None disables notifications. watchdog: the watchdog timeout of the service manager
    in seconds; None if disabled."""

    def __init__(self, address: str | None, watchdog: float | None) -> None:
        self._address = address
        self._watchdog = watchdog

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], pid: int) -> Self:
        """Reads the environment variables and removes them, because they are not meant for child
        processes."""
        address = environment.pop("NOTIFY_SOCKET", None)
        microseconds = environment.pop("WATCHDOG_USEC", "")
        for_this_process = environment.pop("WATCHDOG_PID", "") in ("", str(pid))
        watched = for_this_process and microseconds.isdecimal() and int(microseconds) > 0
        return cls(address or None, int(microseconds) / 1e6 if watched else None)

    @contextlib.asynccontextmanager
    async def watch(self, server: ServerFlags, drain: float) -> AsyncGenerator[None]:
        """Sends notifications while the server runs. drain: the time in seconds after which the
        server aborts running requests."""
        if self._address is None:
            yield
            return
        patience = int((drain + _STOP_MARGIN_SECONDS) * 1e6)
        task = asyncio.create_task(self._run(server, patience))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            # an immediate stop can happen between two polls
            self._notify_stopping(patience)

    async def _run(self, server: ServerFlags, timeout_us: int) -> None:
        every = min(_POLL_SECONDS, self._watchdog / 4 if self._watchdog else _POLL_SECONDS)
        ready = stopping = False
        while True:
            if server.started and not ready:
                ready = self._notify("READY=1")
            if server.should_exit and not stopping:
                stopping = self._notify_stopping(timeout_us)
            if self._watchdog is not None:
                self._notify("WATCHDOG=1")
            await asyncio.sleep(every)

    def _notify_stopping(self, timeout_us: int) -> bool:
        """Reports the maximum time until the server has stopped. May be sent twice."""
        return self._notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={timeout_us}")

    def _notify(self, state: str) -> bool:
        """Sends a message without blocking. Returns whether it was sent."""
        assert self._address is not None
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.setblocking(False)
                line.sendto(state.encode(), address)
        except OSError as error:
            log.debug("cannot send %r to the service manager: %s", state, error)
            return False
        return True
