"""What an answer is written into.

Knows: what uvicorn asks of a transport while it sends an answer. Must not know: HTTP, when a
connection may be closed.
"""

import asyncio
from typing import Protocol


class ClosingConnection(Protocol):
    """A connection that knows how one leaves."""

    transport: asyncio.Transport

    @property
    def closing(self) -> bool:
        """Whether nothing more may be said, or soon will have been."""
        ...

    def close_after_response(self) -> None: ...


class ResponseTransport(asyncio.Transport):
    """uvicorn closes its transport as soon as an answer is written after which there is none. If
    the request had not been read to its end, the system would take the answer back by a reset."""

    def __init__(self, connection: ClosingConnection) -> None:
        super().__init__()
        self._connection = connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.closing

    def close(self) -> None:
        self._connection.close_after_response()
