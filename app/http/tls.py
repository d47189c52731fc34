"""TLS: checks of the certificate and key before the server starts, and the TLS protocol below a
connection.

Knows: the ssl module, asyncio's SSL protocol. Must not know: HTTP, the server.

The certificate is verified with a handshake in memory, as clients would verify it, because the ssl
module does not expose the fields of a loaded certificate.

    accepted ──begin──▶ handshake ──connection_made──▶ everything in app/http/connection.py

asyncio would hide the TLS handshake from the connection. A socket that never starts TLS would then
stay open for a minute without counting against any limit. The connection is therefore notified of
its socket before the handshake.
"""

import asyncio
import os
import ssl
import stat
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from app.core.errors import AppError, ErrorKind

# The number of bytes per read, at most one TLS record. asyncio allocates 256 KiB per open
# connection, which is a quarter of a gigabyte for a thousand connections.
_READ_BYTES = 16 * 1024


class TlsObserver(Protocol):
    """The callbacks with which the TLS layer notifies a connection."""

    def handshake_started(self, transport: asyncio.Transport) -> None:
        """Called when the socket is accepted and the handshake begins."""
        ...

    def write_stalled(self) -> None:
        """Called when some data could not be sent immediately."""
        ...

    def write_drained(self) -> None:
        """Called when all data was sent."""
        ...

    def socket_closed(self) -> None:
        """Called when the socket is closed, whether or not `connection_lost` is also called."""
        ...


class TlsProtocol(SSLProtocol):
    """TLS for one connection.

    connection: the protocol above TLS. Its `connection_made` is called only after a successful
    handshake. handshake_timeout: the number of seconds after which asyncio aborts the handshake;
    the connection may abort it earlier. shutdown_timeout: the number of seconds within which a
    client must reply to close_notify.
    """

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
            cast("asyncio.Future[None]", None),  # asyncio's own servers pass None, too
            server_side=True,
            # asyncio accepts floats, although the type stubs do not
            ssl_handshake_timeout=cast("int", handshake_timeout),
            ssl_shutdown_timeout=cast("int", shutdown_timeout),
        )
        self._observer = observer
        self._write_paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as asyncio's servers pass it
        # TLS adds its own buffers and reports only their state
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
        # the write may have stalled again
        if not self._write_paused:
            self._observer.write_drained()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._observer.socket_closed()


_DAY = 24 * 60 * 60

# A warning is logged this many days before expiry. Automatic renewal happens earlier.
_EXPIRY_WARNING_DAYS = 14


def check_certificate(cert: str, key: str, *, now: float | None = None) -> Sequence[str]:
    """Checks the certificate and the key. Returns warnings for the log if the certificate has
    expired or will soon expire, or if other users may read the key. These problems are not errors:
    clients that do not verify certificates still work, and an expired certificate must not prevent
    a restart.

    cert: a PEM file with the server's certificate first, then the chain to the root. key: a PEM
    file without a passphrase. now: the Unix time; None for the current time. Raises
    AppError(INVALID) if the files cannot be used.
    """
    server = create_ssl_context(cert, key)
    warnings: list[str] = []
    if os.stat(key).st_mode & (stat.S_IRGRP | stat.S_IROTH):
        warnings.append(f"--tls-key: {key} is readable by other users: chmod 600 {key}")
    problem, ends = _verify_by_handshake(server, cert)
    if problem:
        warnings.append(
            f"--tls-cert: clients that verify certificates will reject {cert}: {problem}"
        )
    elif ends - (time.time() if now is None else now) < _EXPIRY_WARNING_DAYS * _DAY:
        day = time.strftime("%Y-%m-%d", time.gmtime(ends))
        warnings.append(f"--tls-cert: {cert} expires on {day}: renew it and restart the server")
    return warnings


def create_ssl_context(cert: str, key: str) -> ssl.SSLContext:
    """Returns the server's SSL context. Raises AppError(INVALID) if the files cannot be used."""
    for option, file in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            content = Path(file).read_bytes()
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise AppError(ErrorKind.INVALID, f"{option}: {file} cannot be read: {why}") from None
        expected = b"CERTIFICATE-----" if file == cert else b"PRIVATE KEY-----"
        if expected not in content and b"CERTIFICATE-----" not in content:
            raise AppError(
                ErrorKind.INVALID,
                f"{option}: {file} is not a PEM file: it must contain a line -----BEGIN …"
                f"{expected.decode()}",
            )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password=_reject_passphrase)
    except AppError:
        raise
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"--tls-key: {key} does not match the certificate in {cert}"
        else:
            why = f"--tls-cert, --tls-key: {cert} and {key} cannot be used: {error.reason or error}"
        raise AppError(ErrorKind.INVALID, why) from None
    return context


def _reject_passphrase() -> str:
    # OpenSSL would prompt at the terminal, which may be unattended
    raise AppError(
        ErrorKind.INVALID,
        "--tls-key: keys with a passphrase are not supported: remove the passphrase "
        "(openssl pkey -in KEY -out NEW) and restrict the permissions of the file",
    )


def _verify_by_handshake(server: ssl.SSLContext, cert: str) -> tuple[str, float]:
    """Returns the verification error of a client that trusts the certificate itself, and the Unix
    time at which the certificate expires."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(up, down, server_side=True)
    theirs = client.wrap_bio(down, up)
    try:
        for _ in range(4):  # each side sends two flights
            for side in (theirs, ours):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError as error:
        return error.verify_message, 0.0
    except ssl.SSLError as error:
        return error.reason or str(error), 0.0
    found = theirs.getpeercert()
    assert found is not None, "a handshake that checked the certificate must have it"
    return "", ssl.cert_time_to_seconds(str(found["notAfter"]))
