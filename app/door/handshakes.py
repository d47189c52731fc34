"""TLS below one connection.

Knows: asyncio's TLS. Must not know: HTTP, how many connections there may be.

    accepted ──begin──▶ handshake ──connection_made──▶ everything that app/door/connections.py knows

asyncio would do all of it by itself and tell nobody: for a minute, a socket that never speaks TLS
would be an open file that nobody counts. So a connection hears of its socket before the handshake.
"""

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Protocol, cast

# Bytes that are read at once: a record of TLS, at most. asyncio's own 256 KiB are taken by each
# connection for as long as it is open, which for a thousand of them is a quarter of a gigabyte.
_READ = 16 * 1024


class Served(Protocol):
    """The connection, as it is told of what happens below it."""

    def begin(self, transport: asyncio.Transport) -> None:
        """Somebody is here, and no TLS was agreed on yet."""
        ...

    def stuck(self) -> None:
        """Some of what was sent has not gone out."""
        ...

    def flows(self) -> None:
        """All of it has."""
        ...

    def gone(self) -> None:
        """The socket is closed. Called also where `connection_lost` was or will be."""
        ...


class Handshake(SSLProtocol):
    """connection: its `connection_made` comes when TLS was agreed on, and never if it was not.
    patience: seconds for the handshake, after which asyncio aborts it; the connection may do so
    earlier. farewell: seconds in which a client must answer to our closing."""

    max_size = _READ

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: asyncio.BaseProtocol,
        context: ssl.SSLContext,
        *,
        served: Served,
        patience: float,
        farewell: float,
    ) -> None:
        super().__init__(
            loop,
            connection,
            context,
            cast("asyncio.Future[None]", None),  # as asyncio's own servers do
            server_side=True,
            # seconds need not be whole, whatever the types say
            ssl_handshake_timeout=cast("int", patience),
            ssl_shutdown_timeout=cast("int", farewell),
        )
        self._served = served
        self._stuck = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # what a server's is
        # TLS has buffers of its own above this one, and tells of them only
        transport.set_write_buffer_limits(high=0)
        self._served.begin(transport)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        self._stuck = True
        super().pause_writing()
        self._served.stuck()

    def resume_writing(self) -> None:
        self._stuck = False
        super().resume_writing()
        # which may have sent more, and that may be stuck again
        if not self._stuck:
            self._served.flows()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._served.gone()
