"""The pipe for the events of a model process: one line per event, from the process to its parent.

Knows: a pair of connected sockets, lines, the codec of events. Must not know: HTTP, jobs, the
meaning of events.

Events use a pipe instead of a response of the process's HTTP server, because every generated token
passes through it, and an HTTP client and server take longer than everything else on this path.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress

from app.runners import worker_protocol
from app.runners.worker_protocol import WorkerEvent

_READ_BYTES = 1 << 16

# The maximum size of an event in bytes. It is many times larger than an event with 512 positions
# with top_logprobs (`split_step`).
_MAX_LINE_BYTES = 1 << 24


class EventWriter(asyncio.Protocol):
    """The end of the model process. on_close: called when the parent has closed its end, or after
    `close`."""

    def __init__(self, end: socket.socket, on_close: Callable[[], None]) -> None:
        self._socket = end
        self._on_close = on_close
        self._pipe: asyncio.WriteTransport | None = None

    async def open(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._pipe = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_close()

    @property
    def has_unsent(self) -> bool:
        """Whether the parent has not read all events, and the kernel's buffer is full."""
        return self._pipe is not None and self._pipe.get_write_buffer_size() > 0

    def write(self, events: Iterable[WorkerEvent]) -> None:
        """Sends events with one write. Never waits."""
        assert self._pipe is not None
        lines = [worker_protocol.WORKER_EVENT.encode(event) + b"\n" for event in events]
        if lines and not self._pipe.is_closing():
            self._pipe.write(b"".join(lines))

    def close(self) -> None:
        """Closes the pipe after all events were sent."""
        if self._pipe is not None:
            self._pipe.close()


async def read_events(end: socket.socket) -> AsyncGenerator[WorkerEvent]:
    """Yields the events at the parent's end until the process closes the pipe. Closing the iterator
    closes the pipe. Raises ConnectionError, and ValueError if an event cannot be decoded."""
    reader, writer = await asyncio.open_connection(sock=end)
    partial = bytearray()
    try:
        while data := await reader.read(_READ_BYTES):
            *lines, rest = data.split(b"\n")
            for line in lines:
                partial += line
                yield worker_protocol.WORKER_EVENT.decode(partial)
                partial.clear()
            partial += rest
            if len(partial) > _MAX_LINE_BYTES:
                raise ValueError("an event is longer than the maximum line length")
            # let other tasks run, even if more data is already available
            await asyncio.sleep(0)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
