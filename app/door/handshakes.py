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
_READ_BYTES = 16 * 1024


class TlsObserver(Protocol):
    """The connection, as it is told of what happens below it."""

    def handshake_started(self, transport: asyncio.Transport) -> None:
        """Somebody is here, and no TLS was agreed on yet."""
        ...

    def write_stalled(self) -> None:
        """Some of what was sent has not gone out."""
        ...

    def write_drained(self) -> None:
        """All of it has."""
        ...

    def socket_closed(self) -> None:
        """The socket is closed. Called also where `connection_lost` was or will be."""
        ...


class TlsProtocol(SSLProtocol):
    """connection: its `connection_made` comes when TLS was agreed on, and never if it was not.
    handshake_timeout: seconds for the handshake, after which asyncio aborts it; the connection may
    do so earlier. shutdown_timeout: seconds in which a client must answer to our closing."""

    max_size = _READ_BYTES

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: asyncio.BaseProtocol,
        context: ssl.SSLContext,
        *,
        observer: TlsObserver,
        handshake_timeout: float,
        shutdown_timeout: float,
    ) -> None:
        super().__init__(
            loop,
            connection,
            context,
            cast("asyncio.Future[None]", None),  # as asyncio's own servers do
            server_side=True,
            # seconds need not be whole, whatever the types say
            ssl_handshake_timeout=cast("int", handshake_timeout),
            ssl_shutdown_timeout=cast("int", shutdown_timeout),
        )
        self._observer = observer
        self._write_paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # what a server's is
        # TLS has buffers of its own above this one, and tells of them only
        transport.set_write_buffer_limits(high=0)
        self._observer.handshake_started(transport)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        self._write_paused = True
        super().pause_writing()
        self._observer.write_stalled()

    def resume_writing(self) -> None:
        self._write_paused = False
        super().resume_writing()
        # which may have sent more, and that may be stuck again
        if not self._write_paused:
            self._observer.write_drained()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._observer.socket_closed()
