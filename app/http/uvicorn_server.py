"""A uvicorn server that ends well.

Knows: uvicorn's server, signals, how long answers may go on. Must not know: routes, what an answer
is, how it is told that it has to end.

    told to stop ──▶ accepts nobody, answers nothing new ──drain──▶ answers are ended with an error
                 ──a few seconds──▶ whoever has not read it is cut off ──▶ lifespan, exit

Told a second time, it ends as a process without a handler would: at once, status 128 + n.

What uvicorn calls for each socket: a connection, and TLS below it.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
from uvicorn import Config
from uvicorn.server import ServerState

from app.core.errors import AppError, ErrorKind
from app.core.server_stats import ConnectionStats
from app.core.settings import Settings
from app.http.connection import SHUTDOWN_MESSAGE, Connection
from app.http.connection_limits import Acceptor, ConnectionLimiter, raise_fd_limit
from app.http.tls import TlsProtocol, create_ssl_context


def make_protocol_factory(
    settings: Settings,
    traffic: ConnectionStats | None = None,
    limiter: ConnectionLimiter | None = None,
) -> type[asyncio.Protocol]:
    """What `uvicorn.Config(http=…)` takes and calls for each socket: the connections of one server,
    bounded together, and with TLS where the settings have a certificate; uvicorn must not have it
    too. limiter: what they have in common, made here otherwise. Raises AppError(INVALID) for a
    certificate that cannot be used."""
    common = limiter or ConnectionLimiter(
        settings, ConnectionStats() if traffic is None else traffic
    )
    certificate = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        certificate = create_ssl_context(settings.tls_cert, settings.tls_key)

    def make_protocol(
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.BaseProtocol:
        loop = asyncio.get_running_loop() if _loop is None else _loop
        connection = Connection(config, server_state, app_state, loop, common)
        if certificate is None:
            return connection
        return TlsProtocol(
            loop,
            connection,
            certificate,
            observer=connection,
            # the connection's own patience ends first
            handshake_timeout=2 * settings.header_timeout,
            shutdown_timeout=settings.body_timeout,
        )

    # uvicorn takes whatever makes a protocol; its types speak of classes
    return cast("type[asyncio.Protocol]", make_protocol)


log = logging.getLogger(__name__)

# Seconds in which clients may read that their answers had to end.
_ERROR_DELIVERY_SECONDS = 3.0

# Seconds in which requests whose client is gone take notice.
_CANCEL_SECONDS = 1.0

# Seconds between two looks at what is still going on.
_POLL_SECONDS = 0.05


class InflightRequests(Protocol):
    """Whoever can end all answers that are in the making."""

    def abort_all(self, error: AppError) -> None: ...


class UvicornServer(uvicorn.Server):
    """config: with `http=entrance.protocol(settings, hall=hall)`. inflight: told when
    `settings.drain` seconds after the first signal some are not whole. limiter: what connections
    have in common."""

    def __init__(
        self,
        config: uvicorn.Config,
        inflight: InflightRequests,
        settings: Settings,
        limiter: ConnectionLimiter,
    ) -> None:
        super().__init__(config)
        self._inflight = inflight
        self._limiter = limiter
        self._acceptors: Sequence[Acceptor] = ()
        self._drain_seconds = settings.drain
        self._max_connections = settings.max_connections
        self._tls_cert = settings.tls_cert

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        most = raise_fd_limit(self._max_connections)
        await super().startup(sockets)
        if most is not None:
            listeners = [listener for server in self.servers for listener in server.sockets]
            self._acceptors = [self._make_acceptor(listener, most) for listener in listeners]

    def _make_acceptor(self, listener: socket.socket, max_sockets: int) -> Acceptor:
        def make_protocol() -> asyncio.Protocol:
            # as uvicorn calls it
            made = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
            return made(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )

        return Acceptor(
            listener,
            make_protocol,
            lambda beginning: self._limiter.has_room(max_sockets - beginning),
        )

    def _log_started_message(self, listeners: Sequence[socket.SocketType]) -> None:
        """uvicorn knows nothing of our TLS."""
        scheme = "http" if self._tls_cert is None else "https"
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        port = self.config.port or listeners[0].getsockname()[1]
        log.info("running on %s://%s:%d (press Ctrl-C to stop)", scheme, host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What uvicorn does with a second signal depends on which one it is, and waits for the
        event loop, which may be what does not move."""
        self._captured_signals.append(sig)
        self.should_exit = True
        if len(self._captured_signals) > 1:
            _flush_logs()
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are raised again behind it, and end the process where it stands."""
        with super().capture_signals():
            try:
                yield
            finally:
                _flush_logs()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        for listener in self.servers:
            listener.close()
        for handed_in in sockets or ():
            handed_in.close()
        log.info("shutting down (%d requests in flight)", len(self.server_state.tasks))
        if not await self._wait_until_idle(self._drain_seconds):
            await self._abort_requests()
        await self.lifespan.shutdown()

    async def _abort_requests(self) -> None:
        """The patience with running answers has come to its end."""
        tasks, connections = self.server_state.tasks, self.server_state.connections
        log.warning(
            "aborting %d requests: still running after %g s (--drain)",
            len(tasks),
            self._drain_seconds,
        )
        self._inflight.abort_all(AppError(ErrorKind.STOPPING, SHUTDOWN_MESSAGE))
        if await self._wait_until_idle(_ERROR_DELIVERY_SECONDS):
            return
        log.warning("closing %d connections", len(connections))
        for connection in tuple(connections):
            cast(Connection, connection).transport.abort()
        if await self._wait_until_idle(_CANCEL_SECONDS):
            return
        log.error("cancelling %d requests that did not stop", len(tasks))
        for task in tuple(tasks):
            task.cancel()

    async def _wait_until_idle(self, seconds: float) -> bool:
        """Whether all clients are gone, and all that they asked for, within that time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        tasks, connections = self.server_state.tasks, self.server_state.connections
        while tasks or connections:
            for connection in tuple(connections):
                # also those which were just being accepted when the others were told
                connection.shutdown()
            if loop.time() >= until:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True


def _flush_logs() -> None:
    """They may be written by a thread, which ends with the process."""
    for handler in logging.getLogger().handlers:
        handler.flush()
