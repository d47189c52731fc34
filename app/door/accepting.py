"""Accepting connections where the process may open fewer files than they would take.

Knows: listening sockets, asyncio. Must not know: HTTP, what a connection does, which one leaves.

asyncio accepts whatever comes. When no file can be opened any more it logs a hundred errors at a
time, and whatever else needs one fails: a connection to a model's process, an import, a template.
So a server with few files accepts no more connections than it has files for: the next ones wait
in the system's queue until others leave.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from app.door.complaints import LogThrottle

log = logging.getLogger(__name__)

# connections that are accepted in one turn of the event loop
_MAX_ACCEPTS_PER_TICK = 16

# seconds until it is tried again, where there was no room, and where the system refused
_RETRY_SECONDS, _ERROR_BACKOFF_SECONDS = 0.05, 0.5


class Acceptor:
    """Accepts in place of an asyncio server.

    listener: the server's, or what it gives out in its place. protocol_factory: makes a
    connection's protocol. has_room: whether one more may be accepted, called with the number of
    those that were accepted and have not begun."""

    def __init__(
        self,
        listener: socket.socket,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        has_room: Callable[[int], bool],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._protocol_factory = protocol_factory
        self._has_room = has_room
        self._starting: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._accept_errors = LogThrottle()
        # the server's own socket must not be accepted from by anybody else
        self._loop.remove_reader(listener.fileno())
        self._socket = listener.dup()
        self._socket.setblocking(False)
        self._resume()

    def close(self) -> None:
        self._pause(None)
        self._socket.close()

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._socket, self._accept)

    def _pause(self, seconds: float | None) -> None:
        self._loop.remove_reader(self._socket)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._resume)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS_PER_TICK):
            if not self._has_room(len(self._starting)):
                self._pause(_RETRY_SECONDS)
                return
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if self._accept_errors.record(time.monotonic()):
                    log.warning("cannot accept connections: %s", error)
                self._pause(_ERROR_BACKOFF_SECONDS)
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._start_protocol(accepted))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start_protocol(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol_factory, accepted)
        except OSError:  # it is gone already
            accepted.close()
