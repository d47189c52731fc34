"""Host and Origin checks: the defenses against DNS rebinding and cross-site request forgery.

Knows: Host headers and request targets (RFC 9110, 7.2; RFC 9112, 3.2), the headers Origin (RFC
6454) and Sec-Fetch-Site (W3C Fetch Metadata). Must not know: keys, the content of requests.

DNS rebinding: a web page can make its own host name resolve to 127.0.0.1 after the page is loaded.
The browser then treats this server as the same origin, and CORS does not apply. The page cannot
change the Host header, which contains the name from which the page was loaded. The server therefore
accepts only names that an attacker cannot own.

Cross-site request forgery: any web page can make the browser send a POST request to this server
without a preflight, through a form or through `fetch` with a plain content type. The page cannot
read the response, but the server would still do the work. Browsers send the origin with such a
request, and pages cannot forge it. Clients other than browsers send neither header and are not
affected.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.http.responses import error_response

# uri-host [":" port]; an IPv6 address may have a zone (RFC 6874)
_AUTHORITY = re.compile(
    r"(?:\[(?P<six>[0-9a-f:.]+)(?:%(?:25)?[\w.~-]+)?\]|(?P<name>[a-z0-9._-]+))(?::[0-9]*)?",
    re.ASCII | re.IGNORECASE,
)

# this machine's own name and its names in Docker and Podman containers
_LOCAL_NAMES = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})

# the maximum length of a DNS name and a port
_MAX_AUTHORITY_CHARS = 255 + len(":65535")

# Origins of pages on this machine, and of desktop apps with an embedded browser, as in Ollama. A
# page of the web cannot have one of these schemes. CORS uses the same pattern (app/api/app.py).
LOCAL_ORIGIN_REGEX = (
    r"(?a:https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
    r"|(app|tauri|vscode-webview|vscode-file)://[^\s/?#@\\,*]{1,255})"
)
_LOCAL_ORIGIN = re.compile(LOCAL_ORIGIN_REGEX)

# Methods without side effects. CORS decides whether a page may read the responses.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedHosts:
    """The set of allowed hosts.

    names: host names in lower case. domains: domains with a leading dot; all names below them are
    allowed.

    Some hosts are always allowed. `localhost` and its subdomains are allowed because resolvers must
    not send them to DNS (RFC 6761, 6.3). The host's names inside containers are allowed because
    names in `.internal` cannot be registered (ICANN reserved it in 2024). IP addresses are allowed
    because DNS rebinding requires a name.
    """

    names: frozenset[str] = frozenset()
    domains: tuple[str, ...] = ()

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Allows the name that the server listens on, and the names given with --allowed-host."""
        listed = [name.lower() for name in settings.allowed_hosts]
        own = parse_host(settings.host)
        return cls(
            names=frozenset(name for name in (*listed, own) if name and name[0] != "."),
            domains=tuple(name for name in listed if name[0] == "."),
        )

    def allows(self, host: str) -> bool:
        """Returns whether the host is allowed. host: a host returned by `parse_host`."""
        return (
            host in self.names
            or host in _LOCAL_NAMES
            or host.endswith((".localhost", *self.domains))
            or _is_address(host)
        )


def parse_host(authority: str) -> str | None:
    """Returns the host of "host:port" in lower case, without the brackets of an address or the
    trailing dot of a name. Returns None if the host is neither a name nor an address."""
    found = _AUTHORITY.fullmatch(authority) if len(authority) <= _MAX_AUTHORITY_CHARS else None
    if found is None:
        return None
    six = found["six"]
    if six is not None:
        return six.lower() if _is_address(six) else None
    return found["name"].lower().removesuffix(".") or None


def get_authorities(scope: Scope) -> Sequence[str]:
    """Returns every authority of a request: the Host header, and the host in the request target, if
    any. The result is empty for an HTTP/1.0 request that has neither."""
    authorities = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    target = scope.get("raw_path") or b"/"
    _, scheme, rest = target.partition(b"://")
    if scheme and not target.startswith(b"/"):
        authorities.append(rest.partition(b"/")[0].decode("latin-1"))
    return authorities


def check_host(scope: Scope, allowed: AllowedHosts) -> None:
    """Raises AppError(FORBIDDEN) unless all authorities are allowed."""
    authorities = get_authorities(scope)
    if not authorities:
        # browsers never send HTTP/1.0, but the health checks of some load balancers do
        if scope["http_version"] == "1.0":
            return
        raise _host_error("the request has no Host header")
    if sum(name == b"host" for name, _ in scope["headers"]) > 1:
        raise _host_error("the request has more than one Host header")
    for authority in authorities:
        host = parse_host(authority)
        if host is None:
            raise _host_error(f"the Host header is not a valid host: {authority[:200]!r}")
        if not allowed.allows(host):
            raise _host_error(
                f"the host {host!r} is not allowed: start the server with --allowed-host {host}, "
                "or use its IP address"
            )


class HostCheckMiddleware:
    """ASGI middleware for the host check. Place it outside all middleware that sends responses."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                check_host(scope, self._allowed)
            except AppError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host_error(message: str) -> AppError:
    return AppError(ErrorKind.FORBIDDEN, message, code="host_not_allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedOrigins:
    """The set of allowed origins. origins: the origins given with --cors-origin; "*" allows all.
    Pages on loopback and desktop apps are always allowed, because they run on this machine."""

    origins: frozenset[str] = frozenset()

    def allows(self, origin: str) -> bool:
        return (
            "*" in self.origins
            or origin in self.origins
            or _LOCAL_ORIGIN.fullmatch(origin) is not None
        )


def check_origin(method: str, headers: Headers, allowed: AllowedOrigins) -> None:
    """Raises AppError(FORBIDDEN) for a request with side effects from a page of another origin,
    unless this origin is allowed.

    The checks run in the same order as in Go's net/http.CrossOriginProtection. Old browsers, and
    all browsers on pages without TLS, send no Sec-Fetch-Site header. In this case, Origin is
    compared with the Host header, which the host check has already validated.
    """
    if method in _SAFE_METHODS:
        return
    site, origins = headers.get("sec-fetch-site"), headers.getlist("origin")
    if site in ("same-origin", "none"):
        return
    if len(origins) == 1 and allowed.allows(origins[0]):
        return
    if site is None:
        if not origins:
            return
        if len(origins) == 1 and origins[0].partition("://")[2] == headers.get("host"):
            return
    where = origins[0][:200] if origins else site or ""
    raise AppError(
        ErrorKind.FORBIDDEN,
        f"cross-origin requests from {where!r} are not allowed: to allow them, start the server "
        "with --cors-origin and the origin of the page",
        code="origin_not_allowed",
    )


class OriginCheckMiddleware:
    """ASGI middleware for the origin check. Place it inside the host check, because it relies on
    the result of that check."""

    def __init__(self, app: ASGIApp, allowed: AllowedOrigins) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                check_origin(scope["method"], Headers(scope=scope), self._allowed)
            except AppError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
