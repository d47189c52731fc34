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
_LOOK_EVERY = 0.25
_AFTER_DRAIN = 30.0


class Serving(Protocol):
    """What is to be told, as uvicorn's server has it. started: it listens. should_exit: it has been
    told to stop."""

    started: bool
    should_exit: bool


class Notices:
    """address: of a datagram socket, with @ before an abstract one; None tells nobody.
    watchdog: seconds of silence after which the manager takes us for hung, if it does at all."""

    def __init__(self, address: str | None, watchdog: float | None) -> None:
        self._address = address
        self._watchdog = watchdog

    @classmethod
    def of(cls, environment: MutableMapping[str, str], pid: int) -> Self:
        """Takes the variables out of the environment: they were not meant for our children."""
        address = environment.pop("NOTIFY_SOCKET", None)
        microseconds = environment.pop("WATCHDOG_USEC", "")
        meant = environment.pop("WATCHDOG_PID", "") in ("", str(pid))
        watched = meant and microseconds.isdecimal() and int(microseconds) > 0
        return cls(address or None, int(microseconds) / 1e6 if watched else None)

    @contextlib.asynccontextmanager
    async def about(self, server: Serving, drain: float) -> AsyncGenerator[None]:
        """drain: seconds that the server takes at most before it ends what still runs."""
        if self._address is None:
            yield
            return
        patience = int((drain + _AFTER_DRAIN) * 1e6)
        task = asyncio.create_task(self._follow(server, patience))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            # where nothing had to be waited for, nobody looked meanwhile
            self._tell_of_stopping(patience)

    async def _follow(self, server: Serving, patience: int) -> None:
        every = min(_LOOK_EVERY, self._watchdog / 4 if self._watchdog else _LOOK_EVERY)
        ready = stopping = False
        while True:
            if server.started and not ready:
                ready = self._tell("READY=1")
            if server.should_exit and not stopping:
                stopping = self._tell_of_stopping(patience)
            if self._watchdog is not None:
                self._tell("WATCHDOG=1")
            await asyncio.sleep(every)

    def _tell_of_stopping(self, microseconds: int) -> bool:
        """How long it may take from now on. To be told twice does no harm."""
        return self._tell(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={microseconds}")

    def _tell(self, words: str) -> bool:
        """Whether it could be told. Waits for nobody."""
        assert self._address is not None
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.setblocking(False)
                line.sendto(words.encode(), address)
        except OSError as error:
            log.debug("cannot send %r to the service manager: %s", words, error)
            return False
        return True
