"""Fetches images from the hosts that an administrator allows (`--image-host`).

Knows: URLs, name resolution, TLS, HTTP/1.1. Must not know: dialects, image formats.

A URL comes from a client, and must not reach other hosts of the server's network. So the host must
be listed by its exact name and must have only public addresses; the connection is to the address
that was checked, not to the name again; and redirects are not followed. Proxies, cookies and
credentials are not used. All code runs on the event loop.
"""

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable

import h11

from app.core.errors import AppError
from app.images.headers import MAX_BYTES
from app.images.input import decode_data_url, invalid_image

_PORT = 443
_TIMEOUT = 10.0
_MAX_FETCHES = 8
_CHUNK = 1 << 16

# Lower-case names with at least one dot, whose last label is not a number: no addresses in any
# notation, user names, ports, escapes, or unusual spellings of names.
_HOST = r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST_NAME = re.compile(_HOST)
_URL = re.compile(rf"https://({_HOST})(?::443)?(/[!-~]*)?", re.IGNORECASE | re.ASCII)

# addresses of IPv6 that contain one of IPv4 (RFC 6052 and 8215, 3056, 4380)
_EMBEDDING_NETWORKS = tuple(
    ipaddress.IPv6Network(one)
    for one in (
        "::/96",
        "::ffff:0:0/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2002::/16",
        "2001::/32",
    )
)

Resolve = Callable[[str], Awaitable[list[str]]]


class FetchError(Exception):
    """An image that was not fetched. The message is a clause."""


class ImageFetcher:
    """Reads images from data URLs, and from https URLs of the allowed hosts.

    hosts: the exact names; none disables fetching. resolve: returns the addresses of a name.
    context: the TLS settings. port: the port of all hosts. Tests replace the last three.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        *,
        resolve: Resolve | None = None,
        context: ssl.SSLContext | None = None,
        is_allowed_address: Callable[[str], bool] | None = None,
        port: int = _PORT,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._resolve = resolve or _resolve
        self._context = context
        self._is_allowed_address = is_allowed_address or is_public_address
        self._port = port
        self._slots = asyncio.Semaphore(_MAX_FETCHES)

    async def read_url(self, url: str, param: str) -> bytes:
        """Returns the bytes of a data URL or of an allowed https URL. Raises AppError(INVALID)."""
        if not self._hosts or url[:5].lower() == "data:":
            return decode_data_url(url, param)
        try:
            host, target = self._parse(url)
            async with self._slots, asyncio.timeout(_TIMEOUT):
                address = await self._choose_address(host)
                return await self._fetch(host, address, target)
        except FetchError as error:
            raise _not_fetched(param, str(error)) from error
        except TimeoutError as error:
            raise _not_fetched(param, f"it took longer than {_TIMEOUT:g} s") from error
        except (OSError, h11.RemoteProtocolError) as error:  # ssl.SSLError is an OSError
            raise _not_fetched(param, "the connection failed") from error

    def _parse(self, url: str) -> tuple[str, str]:
        """Returns the host and the path with the query. Raises FetchError."""
        match = _URL.fullmatch(url.partition("#")[0])
        if match is None:
            raise FetchError("only plain https URLs with a host name are allowed")
        host = match[1].lower()
        if host not in self._hosts:
            raise FetchError("its host is not allowed on this server (--image-host)")
        return host, match[2] or "/"

    async def _choose_address(self, host: str) -> str:
        addresses = await self._resolve(host)
        if not addresses or not all(map(self._is_allowed_address, addresses)):
            raise FetchError("its host has no public address")
        return addresses[0]

    async def _fetch(self, host: str, address: str, target: str) -> bytes:
        if self._context is None:
            self._context = ssl.create_default_context()
        reader, writer = await asyncio.open_connection(
            address, self._port, ssl=self._context, server_hostname=host
        )
        try:
            return await _exchange(reader, writer, host, target)
        finally:
            writer.transport.abort()


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, target: str
) -> bytes:
    """Sends the request and returns the body of the response. Raises FetchError."""
    connection = h11.Connection(h11.CLIENT)
    headers = [("Host", host), ("Accept", "image/*"), ("Accept-Encoding", "identity")]
    request = h11.Request(method="GET", target=target, headers=[*headers, ("Connection", "close")])
    writer.write(connection.send(request) + connection.send(h11.EndOfMessage()))
    await writer.drain()
    parts: list[bytes] = []
    size = 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_CHUNK))
        elif isinstance(event, h11.Response):
            if event.status_code != 200:
                raise FetchError(f"its host answered with status {event.status_code}")
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
            size += len(event.data)
            if size > MAX_BYTES:
                raise FetchError(f"it has more than {MAX_BYTES:,} bytes")
        elif isinstance(event, h11.InformationalResponse):
            continue
        else:
            return b"".join(parts)


def is_public_address(text: str) -> bool:
    """Returns whether an address is on the internet: not private, loopback, link-local, shared
    (RFC 6598), multicast or reserved, nor an IPv6 address that contains an IPv4 address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and any(
        address in one for one in _EMBEDDING_NETWORKS
    ):
        return False
    return address.is_global and not address.is_multicast


def is_host_name(text: str) -> bool:
    """Returns whether a string can be in the list of hosts."""
    return _HOST_NAME.fullmatch(text.lower()) is not None


async def _resolve(host: str) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(
        host, _PORT, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
    )
    return [str(address[0]) for *_, address in found]


def _not_fetched(param: str, reason: str) -> AppError:
    return invalid_image(
        param,
        f"the image was not fetched: {reason}: send a data URL, such as data:image/png;base64,…",
    )
