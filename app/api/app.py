"""The ASGI application: routes, what surrounds them, and the shape of every error.

Knows starlette's handlers and middlewares, and in which order a request passes those of app/door.
Must not know: dialects, who builds `generate`, where keys come from.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Lifespan

from app.api import build_routes
from app.api.fields import quote_value
from app.core.errors import AppError, ErrorKind
from app.core.ports import Generate
from app.core.server_stats import ConnectionStats, EventLoopLag
from app.core.settings import LOOPBACK_ORIGIN_REGEX, Settings
from app.core.thread_pools import ThreadPools
from app.http.api_keys import Keyring
from app.http.auth import AuthMiddleware
from app.http.host import AllowedHosts, HostCheckMiddleware
from app.http.origin import AllowedOrigins, OriginCheckMiddleware
from app.http.request_id import REQUEST_ID_HEADER, RequestIdMiddleware
from app.http.responses import ClientDisconnected, error_response

# The headers of OpenAI's SDK for browsers, which a page may only send if a preflight allows them,
# and the one by which a request names itself.
SDK_HEADERS = (
    "Authorization",
    "Content-Type",
    "Idempotency-Key",
    "OpenAI-Beta",
    "OpenAI-Organization",
    "OpenAI-Project",
    "User-Agent",
    "X-API-Key",
    REQUEST_ID_HEADER,
    "X-Stainless-Arch",
    "X-Stainless-Async",
    "X-Stainless-Custom-Poll-Interval",
    "X-Stainless-Helper-Method",
    "X-Stainless-Lang",
    "X-Stainless-OS",
    "X-Stainless-Package-Version",
    "X-Stainless-Poll-Helper",
    "X-Stainless-Read-Timeout",
    "X-Stainless-Retry-Count",
    "X-Stainless-Runtime",
    "X-Stainless-Runtime-Version",
    "X-Stainless-Timeout",
)


# What of an answer's headers a page may read: the SDK looks at both.
EXPOSED_HEADERS = (REQUEST_ID_HEADER, "Retry-After")


class _Application(Starlette):
    """outer_middleware: middlewares that every reply passes. Starlette's own list stands within its
    handler of faults, whose replies would reach nobody of another origin, and would have no
    name."""

    def __init__(
        self,
        *,
        routes: Sequence[BaseRoute],
        outer_middleware: Sequence[Middleware],
        exception_handlers: Mapping[Any, Any],
        lifespan: Lifespan[Starlette] | None,
    ) -> None:
        super().__init__(routes=routes, exception_handlers=exception_handlers, lifespan=lifespan)
        self._outer_middleware = outer_middleware

    def build_middleware_stack(self) -> ASGIApp:
        app = super().build_middleware_stack()
        for middleware, arguments, options in reversed(self._outer_middleware):
            app = middleware(app, *arguments, **options)
        return app


def build_app(
    generate: Generate,
    settings: Settings,
    lifespan: Lifespan[Starlette] | None = None,
    keyring: Keyring | None = None,
    traffic: ConnectionStats | None = None,
    workers: ThreadPools | None = None,
    lag: EventLoopLag | None = None,
) -> Starlette:
    """keyring: None is one without keys. traffic: where answers are counted; None is nowhere.
    workers: None makes some. lag: the event loop's; None is one that nothing measures.
    Raises AppError(INVALID) for names and origins in settings that are none."""
    origins = AllowedOrigins.from_settings(settings)
    counted = ConnectionStats() if traffic is None else traffic
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_origin_regex=LOOPBACK_ORIGIN_REGEX,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=SDK_HEADERS,
        expose_headers=EXPOSED_HEADERS,
        # a page that may call us may do so from a network that is not ours
        allow_private_network=True,
    )
    app = _Application(
        routes=build_routes(
            generate, settings, counted, workers or ThreadPools(), lag or EventLoopLag()
        ),
        # CORS before the keys: browsers send none with a preflight, and a page that may call us
        # may also read why it was refused
        outer_middleware=[
            Middleware(RequestIdMiddleware, counted),
            Middleware(HostCheckMiddleware, AllowedHosts.from_settings(settings)),
            cors,
            Middleware(OriginCheckMiddleware, origins),
            Middleware(AuthMiddleware, Keyring() if keyring is None else keyring),
        ],
        exception_handlers={
            AppError: _handle_app_error,
            ClientDisconnected: _handle_disconnect,
            HTTPException: _handle_http_exception,
            Exception: _handle_unexpected,
        },
        lifespan=lifespan,
    )
    # A path with a slash too many is an unknown path: a redirect would lose most clients' bodies.
    app.router.redirect_slashes = False
    return app


async def _handle_app_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)
    return error_response(error)


async def _handle_disconnect(request: Request, error: Exception) -> Response:
    """Never sent to anyone; the status, nginx's for a client that left, is for the access log."""
    return Response(status_code=499)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, the only two that the router raises by itself."""
    assert isinstance(error, HTTPException)
    where = f"{request.method[:20]} {quote_value(request.url.path)}"
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        told = AppError(
            ErrorKind.METHOD_NOT_ALLOWED,
            f"method not allowed: {where}; this endpoint accepts {allowed}",
        )
        return error_response(told, headers={"Allow": allowed})
    assert error.status_code == 404
    return error_response(
        AppError(ErrorKind.NOT_FOUND, f"no such endpoint: {where}; the API is under /v1")
    )


async def _handle_unexpected(request: Request, error: Exception) -> Response:
    """A fault of ours. Starlette raises it again for the server to log, so nothing is told here
    that could only be of use to someone who may read the log."""
    told = "internal error: see the server's log"
    return error_response(AppError(ErrorKind.ENGINE, told, code="internal_error"))
