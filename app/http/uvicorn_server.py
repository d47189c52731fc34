"""A uvicorn server with a graceful shutdown.

Knows: uvicorn's server, signals, the drain timeout. Must not know: routes,
responses, how requests are aborted.

    signal ──▶ accepts no connection, handles no new request ──drain──▶ responses end with an error
           ──a few seconds──▶ clients that have not read it are disconnected ──▶ lifespan, exit

On a second signal, the process exits immediately with status 128 + n, as without a handler.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Generator, Sequence
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn import Config

from app.core.errors import AppError, ErrorKind
from app.core.request_lifecycle import RequestLimits
from app.core.settings import Settings
from app.core.units import pluralize
from app.core.usage import ConnectionStats
from app.http.connection import SHUTDOWN_MESSAGE, Connection
from app.http.connection_limits import ConnectionLimiter
from app.http.uvicorn_internals import HookedServer, ServerState

log = logging.getLogger(__name__)

# How long clients may take to read the error that ended their response, in seconds.
_ERROR_DELIVERY_SECONDS = 3.0

# How long the cancellation of requests of disconnected clients may take, in seconds.
_CANCEL_SECONDS = 1.0

# The number of seconds between two checks for running requests.
_POLL_SECONDS = 0.05


def make_protocol_factory(
    settings: Settings,
    traffic: ConnectionStats | None = None,
    limiter: ConnectionLimiter | None = None,
) -> type[asyncio.Protocol]:
    """Returns the protocol factory for `uvicorn.Config(http=…)`, which uvicorn calls for each
    socket. The connections share their limits. limiter: the shared limits; None creates them."""
    common = limiter or ConnectionLimiter(
        settings, ConnectionStats() if traffic is None else traffic
    )

    def make_protocol(
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.BaseProtocol:
        loop = asyncio.get_running_loop() if _loop is None else _loop
        return Connection(config, server_state, app_state, loop, common)

    # uvicorn accepts any factory, but its type hints require a class
    return cast("type[asyncio.Protocol]", make_protocol)


class UvicornServer(HookedServer):
    """A uvicorn server with a graceful shutdown.

    config: must be created with `http=make_protocol_factory(settings, limiter=limiter)`. limits:
    abort the requests that still run `settings.drain` seconds after the first signal. limiter: the
    shared connection limits.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        limits: RequestLimits,
        settings: Settings,
        limiter: ConnectionLimiter,
    ) -> None:
        super().__init__(config)
        self._limits = limits
        self._limiter = limiter
        self._drain_seconds = settings.drain
        # known once the server listens
        self.url = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._limiter.raise_fd_limit()
        await super().startup(sockets)

    def log_listening(self, listeners: Sequence[socket.SocketType]) -> None:
        """Logs the address."""
        scheme = "https" if self.config.is_ssl else "http"
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        port = self.config.port or listeners[0].getsockname()[1]
        self.url = f"{scheme}://{host}:{port}"
        log.info("running on %s (press Ctrl-C to stop)", self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal. uvicorn's handling of a second signal depends on the signal number, and
        does not work while the event loop is blocked."""
        self.should_exit = True
        if self.record_signal(sig) > 1:
            _flush_logs()
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handles signals. On exit, they are raised again, which ends the process immediately."""
        with super().capture_signals():
            try:
                yield
            finally:
                _flush_logs()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._limiter.traffic.shutting_down = True
        for listener in self.servers:
            listener.close()
        for inherited in sockets or ():
            inherited.close()
        requests = pluralize(len(self.server_state.tasks), "request")
        log.info("shutting down (%s in flight)", requests)
        if not await self._wait_until_idle(self._drain_seconds):
            await self._abort_requests()
        await self.lifespan.shutdown()

    async def _abort_requests(self) -> None:
        """Aborts running requests at the end of the drain."""
        tasks, connections = self.server_state.tasks, self.server_state.connections
        log.warning(
            "aborting %s: still running after %g s (--drain)",
            pluralize(len(tasks), "request"),
            self._drain_seconds,
        )
        self._limits.abort_all(AppError(ErrorKind.STOPPING, SHUTDOWN_MESSAGE))
        if await self._wait_until_idle(_ERROR_DELIVERY_SECONDS):
            return
        log.warning("closing %s", pluralize(len(connections), "connection"))
        for connection in tuple(connections):
            cast(Connection, connection).transport.abort()
        if await self._wait_until_idle(_CANCEL_SECONDS):
            return
        log.error("cancelling %s: still running", pluralize(len(tasks), "request"))
        for task in tuple(tasks):
            task.cancel()

    async def _wait_until_idle(self, seconds: float) -> bool:
        """Waits until all clients have disconnected and all requests have ended. Returns False on
        timeout."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        tasks, connections = self.server_state.tasks, self.server_state.connections
        while tasks or connections:
            for connection in tuple(connections):
                # includes connections accepted in the meantime
                connection.shutdown()
            if loop.time() >= until:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True


def _flush_logs() -> None:
    """Flushes log handlers, because they may write on a thread that ends with the process."""
    for handler in logging.getLogger().handlers:
        handler.flush()
