"""Checks before the server binds its socket: is the address free, and is it safe to use?

Knows: addresses, the settings that protect a public address. Must not know: key validation, the
listening server.
"""

import errno
import ipaddress
import os
import socket
from collections.abc import MutableMapping, Sequence
from typing import Any

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.http.api_keys import Keyring
from app.http.tls import check_certificate

_BIND_HINTS = {
    errno.EADDRINUSE: "the port is in use: stop the other program or choose another --port",
    errno.EACCES: "permission denied: choose a --port above 1023, or run a reverse proxy in "
    "front of the server",
    errno.EADDRNOTAVAIL: "no interface of this machine has this address: choose another --host",
}


def check_bind_address(host: str, port: int) -> None:
    """Checks that the address is free. port: the port number; 0 selects any free port. Raises
    AppError(INVALID) if the server cannot listen on the address."""
    try:
        # same arguments as in asyncio, where an empty name means all addresses
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = f"--host: cannot listen on {host!r}: {why}"
        raise AppError(ErrorKind.INVALID, message, param="host") from None
    for family, kind, protocol, _, address in found:
        _try_bind(family, kind, protocol, address)


def _try_bind(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> None:
    try:
        probe = socket.socket(family, kind, protocol)
    except OSError:  # a kernel without IPv6, which the server also skips
        return
    with probe:
        # otherwise a previous server's connections in TIME_WAIT would block the address
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(address)
        except OSError as error:
            where = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
            why = _BIND_HINTS.get(error.errno or 0, os.strerror(error.errno or 0).lower())
            message = f"cannot listen on {where}:{address[1]}: {why}"
            param = "host" if error.errno == errno.EADDRNOTAVAIL else "port"
            raise AppError(ErrorKind.INVALID, message, param=param) from None


def check_security_settings(
    settings: Settings, environment: MutableMapping[str, str]
) -> tuple[Keyring, Sequence[str]]:
    """Checks the keys, the bind policy and the certificate. Called by `serve` before it listens,
    and by `config`. Origins and host names are checked where they are parsed
    (`app.config.value_types`). Removes the keys from `environment`. Returns the keys and warnings
    for the log. Raises AppError(INVALID) for settings that prevent the server from starting."""
    keyring = Keyring.from_settings(settings, environment)
    warnings = list(check_bind_policy(settings, has_keys=keyring.enabled))
    if settings.tls_cert is not None and settings.tls_key is not None:
        warnings += check_certificate(settings.tls_cert, settings.tls_key)
    return keyring, warnings


def check_bind_policy(settings: Settings, *, has_keys: bool) -> Sequence[str]:
    """Returns warnings for the log about settings that are allowed but risky. Raises
    AppError(INVALID) for a public server without authentication, unless this was explicitly
    allowed."""
    if has_keys:
        if is_loopback(settings.host) or settings.tls_cert is not None:
            return ()
        return (
            f"listening on {settings.host} without TLS: keys and prompts are sent unencrypted "
            "unless a proxy or a tunnel encrypts them",
        )
    if "*" in settings.cors_origins and not settings.allow_anyone:
        raise AppError(
            ErrorKind.INVALID,
            "--cors-origin '*' without API keys lets any web page opened on this machine use the "
            "server: create a key with `mlxrunner key NAME --file FILE` and pass --api-keys FILE, "
            "or pass --allow-anyone",
            param="cors_origins",
        )
    named = [name for name in settings.allowed_hosts if not is_loopback(name)]
    if named and not settings.allow_anyone:
        raise AppError(
            ErrorKind.INVALID,
            f"--allowed-host {named[0]} without API keys lets anyone who reaches the server by "
            "that name use it, for example through a proxy, whose requests come from this machine: "
            "create a key with `mlxrunner key NAME --file FILE` and pass --api-keys FILE, or pass "
            "--allow-anyone",
            param="allowed_hosts",
        )
    if is_loopback(settings.host):
        return tuple(
            f"accepting requests for {name} without API keys: anyone who can reach it can use it"
            for name in named[:1]
        )
    if not settings.allow_anyone:
        raise AppError(
            ErrorKind.INVALID,
            f"listening on {settings.host} without API keys lets anyone who can reach it use the "
            "server: create a key with `mlxrunner key NAME --file FILE` and pass --api-keys FILE, "
            "or pass --allow-anyone",
            param="host",
        )
    return (f"listening on {settings.host} without API keys: anyone who can reach it can use it",)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the host. Names other than `localhost` may
    resolve to any address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
