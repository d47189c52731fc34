"""What uvicorn calls for each socket: a connection, and TLS below it.

Knows: settings, how connections and what they share are put together. Must not know: what happens
on a connection.
"""

import asyncio
from typing import Any, cast

from uvicorn import Config
from uvicorn.server import ServerState

from app.core.settings import Settings
from app.core.traffic import ConnectionStats
from app.door.certificates import create_ssl_context
from app.door.connections import Connection
from app.door.hall import ConnectionLimiter
from app.door.handshakes import TlsProtocol


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
