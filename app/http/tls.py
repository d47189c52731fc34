"""Whether a certificate and its key are fit to serve with, found out before anybody connects.

Knows: the ssl module. The certificate is tried as clients try it, by a handshake in memory, because
the module tells nothing of a certificate that was merely loaded. Must not know: who serves.

TLS below one connection.

    accepted ──begin──▶ handshake ──connection_made──▶ everything that app/http/connection.py knows

asyncio would do all of it by itself and tell nobody: for a minute, a socket that never speaks TLS
would be an open file that nobody counts. So a connection hears of its socket before the handshake.
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


_DAY = 24 * 60 * 60

# Days before its end at which it is spoken of. Those who renew by themselves do so earlier.
_EXPIRY_WARNING_DAYS = 14


def check_certificate(cert: str, key: str, *, now: float | None = None) -> Sequence[str]:
    """Sentences for the log: that it is over or soon will be, that others may read the key. Who
    does not check certificates is served all the same, and a restart at night must not be what
    makes an old certificate stop everything; so none of it is an error.

    cert: PEM, the server's certificate first, then those between it and the root. key: PEM, without
    a passphrase. now: Unix time. Raises AppError(INVALID) if it cannot be served with."""
    server = create_ssl_context(cert, key)
    told: list[str] = []
    if os.stat(key).st_mode & (stat.S_IRGRP | stat.S_IROTH):
        told.append(f"--tls-key: {key} is readable by other users: chmod 600 {key}")
    problem, ends = _verify_by_handshake(server, cert)
    if problem:
        told.append(f"--tls-cert: clients that verify certificates will reject {cert}: {problem}")
    elif ends - (time.time() if now is None else now) < _EXPIRY_WARNING_DAYS * _DAY:
        day = time.strftime("%Y-%m-%d", time.gmtime(ends))
        told.append(f"--tls-cert: {cert} expires on {day}: renew it and restart the server")
    return told


def create_ssl_context(cert: str, key: str) -> ssl.SSLContext:
    """What a server speaks TLS with. Raises AppError(INVALID) as `check_certificate` does."""
    for option, file in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            content = Path(file).read_bytes()
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise AppError(ErrorKind.INVALID, f"{option}: {file} cannot be read: {why}") from None
        wanted = b"CERTIFICATE-----" if file == cert else b"PRIVATE KEY-----"
        if wanted not in content and b"CERTIFICATE-----" not in content:
            raise AppError(
                ErrorKind.INVALID,
                f"{option}: {file} is not a PEM file: it must contain a line -----BEGIN …"
                f"{wanted.decode()}",
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
    # OpenSSL would ask at the terminal, where nobody may be
    raise AppError(
        ErrorKind.INVALID,
        "--tls-key: keys with a passphrase are not supported: remove the passphrase "
        "(openssl pkey -in KEY -out NEW) and restrict the permissions of the file",
    )


def _verify_by_handshake(server: ssl.SSLContext, cert: str) -> tuple[str, float]:
    """What a client that trusts the certificate itself finds wrong with it, and the Unix time at
    which it ends."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(up, down, server_side=True)
    theirs = client.wrap_bio(down, up)
    try:
        for _ in range(4):  # each side says two things, and then has heard all
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
    assert found is not None, "a handshake that checked the certificate has it"
    return "", ssl.cert_time_to_seconds(str(found["notAfter"]))
