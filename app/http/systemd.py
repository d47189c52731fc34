"""Telling the system's service manager how the server stands: sd_notify(3) of systemd.

Knows: the variables and words of that protocol. Must not know: uvicorn, what the server does. Where
nobody asked to be told, as on every other system, nothing happens.

    READY=1 when it listens · WATCHDOG=1 for as long as the event loop turns · STOPPING=1, and how
    long that may take, when it drains

The watchdog is the point of it: a front door that hangs cannot say so over HTTP, and the engine's
own watchdog looks at engines only.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, MutableMapping
from typing import Protocol, Self

log = logging.getLogger(__name__)

# Seconds between two looks at the server, and between a drain's end and the end of patience.
_POLL_SECONDS = 0.25
_STOP_MARGIN_SECONDS = 30.0


class ServerFlags(Protocol):
    """What is to be told, as uvicorn's server has it. started: it listens. should_exit: it has been
    told to stop."""

    started: bool
    should_exit: bool


class SystemdNotifier:
    """address: of a datagram socket, with @ before an abstract one; None tells nobody.
    watchdog: seconds of silence after which the manager takes us for hung, if it does at all."""

    def __init__(self, address: str | None, watchdog: float | None) -> None:
        self._address = address
        self._watchdog = watchdog

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], pid: int) -> Self:
        """Takes the variables out of the environment: they were not meant for our children."""
        address = environment.pop("NOTIFY_SOCKET", None)
        microseconds = environment.pop("WATCHDOG_USEC", "")
        meant = environment.pop("WATCHDOG_PID", "") in ("", str(pid))
        watched = meant and microseconds.isdecimal() and int(microseconds) > 0
        return cls(address or None, int(microseconds) / 1e6 if watched else None)

    @contextlib.asynccontextmanager
    async def watch(self, server: ServerFlags, drain: float) -> AsyncGenerator[None]:
        """drain: seconds that the server takes at most before it ends what still runs."""
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
            # where nothing had to be waited for, nobody looked meanwhile
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
        """How long it may take from now on. To be told twice does no harm."""
        return self._notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={timeout_us}")

    def _notify(self, state: str) -> bool:
        """Whether it could be told. Waits for nobody."""
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
