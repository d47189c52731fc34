"""Origin checks: the defense against cross-site request forgery.

Knows: the headers Origin (RFC 6454) and Sec-Fetch-Site (W3C Fetch Metadata). Must not know: keys,
the content of requests.

Any web page can make the browser send a POST request to this server without a preflight, through a
form or through `fetch` with a plain content type. The page cannot read the response, but the server
would do the work. Browsers report the origin of such a request, and pages cannot change the
reported origin. Clients other than browsers send neither header and are not affected.
"""

import re
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings, is_origin
from app.http.errors import error_response

# Origins of pages on this machine. CORS uses the same pattern (app/api/app.py).
LOOPBACK_ORIGIN_REGEX = r"(?a:https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?)"
_LOOPBACK_ORIGIN = re.compile(LOOPBACK_ORIGIN_REGEX)

# Methods without side effects. CORS decides whether a page may read the responses.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedOrigins:
    """The allowed origins. origins: the origins of --cors-origin; "*" allows all. Pages on loopback
    are always allowed, because this machine serves them."""

    origins: frozenset[str] = frozenset()

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Returns the origins of --cors-origin. Raises AppError(INVALID) for an invalid origin."""
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
    """Raises AppError(FORBIDDEN) for a request with side effects from a page of another origin,
    unless this origin is allowed.

    The checks run in the order of Go's net/http.CrossOriginProtection. Old browsers, and all
    browsers on pages without TLS, send no Sec-Fetch-Site header. For these, the last check compares
    Origin with the Host header, which app/http/host.py has already checked.
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
