"""Whether there is room at the address where the server is to listen, found out at once.

Knows: sockets. Must not know: who listens. What is found here may be old when the server binds,
which can fail all the same; but mostly whoever named a port that is taken reads so here, in one
line, and not after a model was downloaded.
"""

import errno
import os
import socket
from typing import Any

from app.core.errors import AppError, ErrorKind

_BIND_HINTS = {
    errno.EADDRINUSE: "the port is in use: stop the other program or choose another --port",
    errno.EACCES: "permission denied: choose a --port above 1023, or run a reverse proxy in "
    "front of the server",
    errno.EADDRNOTAVAIL: "no interface of this machine has this address: choose another --host",
}


def check_bind_address(host: str, port: int) -> None:
    """port: 0 is any that is free. Raises AppError(INVALID)."""
    try:
        # as asyncio asks, for which an empty name is every address
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
    except OSError:  # a kernel without IPv6: the server does without it too
        return
    with probe:
        # or a server that ended just now would be in the way
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
