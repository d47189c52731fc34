"""Origin checks: the defense against cross-site request forgery.

Knows: the headers Origin (RFC 6454) and Sec-Fetch-Site (W3C Fetch Metadata). Must not know: keys,
what is requested.

A page of any site can make the browser send a POST to this server, by a form or by `fetch` with a
plain content type, without a preflight. It cannot read the response, but the work is done. Browsers
report the origin of such a request, and pages cannot change that. Clients other than browsers send
neither header and are not affected.
"""

import re
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.core.errors import AppError, ErrorKind
from app.core.settings import LOOPBACK_ORIGIN_REGEX, Settings, is_origin
from app.http.responses import error_response

_LOOPBACK_ORIGIN = re.compile(LOOPBACK_ORIGIN_REGEX, re.ASCII)

# Methods without side effects; CORS decides whether a page may read their responses.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedOrigins:
    """The allowed origins. origins: those of --cors-origin; "*" allows all. Pages on loopback are
    always allowed, because this machine serves them."""

    origins: frozenset[str] = frozenset()

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Raises AppError(INVALID)."""
        for origin in settings.cors_origins:
            if origin != "*" and not is_origin(origin):
                raise AppError(
                    ErrorKind.INVALID,
                    "--cors-origin takes an origin as browsers send it, such as "
                    "https://chat.example.org (lower case, no path, no trailing slash, no default "
                    f"port), not {origin!r}",
                    param="cors_origins",
                )
        return cls(origins=frozenset(settings.cors_origins))

    def allows(self, origin: str) -> bool:
        return (
            "*" in self.origins
            or origin in self.origins
            or _LOOPBACK_ORIGIN.fullmatch(origin) is not None
        )


def check_origin(method: str, headers: Headers, allowed: AllowedOrigins) -> None:
    """Raises AppError(FORBIDDEN) for a request with side effects from a page of another origin that
    is not allowed.

    The checks are in the order of Go's net/http.CrossOriginProtection. Old browsers, and all
    browsers on pages without TLS, send no Sec-Fetch-Site; hence the last check. It compares Origin
    with the Host header, which app/http/host.py has checked before.
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
    """ASGI middleware for the origin check. Place it behind the host check, whose result it relies
    on."""

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
