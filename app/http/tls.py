"""Checks of the TLS certificate and key before the server starts.

Knows: the ssl module. Must not know: HTTP, the server. uvicorn itself reads the files again.

The certificate is verified with a handshake in memory, as clients would verify it, because the ssl
module does not expose the fields of a loaded certificate.
"""

import os
import ssl
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from app.core.errors import AppError, ErrorKind

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
    server = _create_ssl_context(cert, key)
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


def _create_ssl_context(cert: str, key: str) -> ssl.SSLContext:
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
