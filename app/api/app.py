"""The ASGI application: routes, middleware and error responses.

Knows: Starlette's exception handlers, the order of the middleware in app/http, the discovery of
dialects. Must not know: the formats of dialects, how `generate` is built, where keys are stored.

A dialect is a module below app/api that defines a function `routes(generate, models, settings,
bodies)`, and ERRORS if its error responses differ from OpenAI's
(app/http/responses.py:DialectErrors). Dialects are discovered by these names; there is no list of
dialects.
"""

import pkgutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from app.api.fields import quote_value
from app.api.metrics.registry import Metrics
from app.api.status import FrontendStats, engine_event_routes, health_routes, usage_routes
from app.core.errors import AppError, ErrorKind
from app.core.ports import Generate, Models
from app.core.request_context import RequestContextObserver
from app.core.request_lifecycle import ObservedGenerate, ObserverFactory, RequestLimits
from app.core.settings import LiveSettings, Settings
from app.core.thread_pools import ThreadPools
from app.core.usage import ConnectionStats, EventLoopLag, UsageCounters
from app.http.api_keys import Keyring
from app.http.auth import AuthMiddleware
from app.http.body import RequestBodies
from app.http.host_and_origin import (
    LOCAL_ORIGIN_REGEX,
    AllowedHosts,
    AllowedOrigins,
    HostCheckMiddleware,
    OriginCheckMiddleware,
)
from app.http.request_id import (
    ANTHROPIC_REQUEST_ID_HEADER,
    NOTICE_HEADER,
    REQUEST_ID_HEADER,
    RequestIdMiddleware,
)
from app.http.responses import SHOULD_RETRY_HEADER, error_response
from app.http.streaming import ClientDisconnected

# The headers that OpenAI's and Anthropic's SDKs and OpenRouter's clients send from browsers, and
# the request ID header. A web page may send them only if the preflight response allows them.
SDK_HEADERS = (
    "Anthropic-Beta",
    "Anthropic-Dangerous-Direct-Browser-Access",
    "Anthropic-Version",
    "Authorization",
    "Content-Type",
    "HTTP-Referer",
    "Idempotency-Key",
    "OpenAI-Beta",
    "OpenAI-Organization",
    "OpenAI-Project",
    "User-Agent",
    "X-API-Key",
    REQUEST_ID_HEADER,
    "X-Requested-With",
    "X-Stainless-Arch",
    "X-Stainless-Async",
    "X-Stainless-Custom-Poll-Interval",
    "X-Stainless-Helper",
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
    "X-Title",
)


# The response headers that a page may read. The SDKs read all except the notice.
EXPOSED_HEADERS = (
    REQUEST_ID_HEADER,
    ANTHROPIC_REQUEST_ID_HEADER,
    "Retry-After",
    SHOULD_RETRY_HEADER,
    NOTICE_HEADER,
)

_V1 = "/v1"


class _Application(Starlette):
    """A Starlette application with middleware outside its error handler.

    outer_middleware: the middleware that every response passes through. Starlette's own middleware
    list runs inside its error handler, so error responses would lack the CORS headers and the
    request ID.
    """

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


class _Cors(CORSMiddleware):
    """CORS as in llama.cpp. A preflight from a disallowed origin gets 200 without
    Access-Control-Allow-Origin, so that the browser does not send the request. "*" in the settings
    allows each origin by its name."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if not self.is_allowed_origin(request_headers["origin"]):
            response.status_code = 200
        return response


class _ShortPathMiddleware:
    """ASGI middleware that adds /v1 to the path of a request, if there is a route for the longer
    path and none for the path itself, as clients of llama.cpp send it. Place it outermost, so that
    authorization, error formats and the access log see only the path of the route."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._patterns = [route.path_regex for route in routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if not path.startswith(f"{_V1}/") and self._is_short(path):
                raw = _V1.encode() + scope.get("raw_path", path.encode())
                scope = {**scope, "path": _V1 + path, "raw_path": raw}
        await self._app(scope, receive, send)

    def _is_short(self, path: str) -> bool:
        return self._has_route(_V1 + path) and not self._has_route(path)

    def _has_route(self, path: str) -> bool:
        return any(pattern.match(path) for pattern in self._patterns)


def _cors_middleware(settings: Settings) -> Middleware:
    everyone = "*" in settings.cors_origins
    return Middleware(
        _Cors,
        allow_origins=() if everyone else settings.cors_origins,
        allow_origin_regex=".*" if everyone else LOCAL_ORIGIN_REGEX,
        allow_methods=("GET", "POST", "DELETE", "OPTIONS"),
        allow_headers=SDK_HEADERS,
        expose_headers=EXPOSED_HEADERS,
        # allowed pages may call this server from another network
        allow_private_network=True,
    )


def build_app(
    generate: Generate,
    models: Models,
    settings: Settings,
    lifespan: Lifespan[Starlette] | None = None,
    keyring: Keyring | None = None,
    traffic: ConnectionStats | None = None,
    workers: ThreadPools | None = None,
    lag: EventLoopLag | None = None,
    live: LiveSettings | None = None,
    usage: UsageCounters | None = None,
    limits: RequestLimits | None = None,
    observers: Sequence[ObserverFactory] = (),
) -> Starlette:
    """Builds the application.

    keyring: the API keys; None disables authentication. traffic: the response counters; None
    creates new counters. workers: the thread pools; None creates new pools. lag: the event loop
    lag; None creates one that is never updated. live: the settings that a reload may replace; None
    if there are no reloads. usage: the usage of each key; None creates counters that stay at zero.
    limits: the limits of requests, which count the usage; None for no limits. observers: observe
    each generation and embedding request.
    """
    origins = AllowedOrigins(origins=frozenset(settings.cors_origins))
    counted = ConnectionStats() if traffic is None else traffic
    dialects = _find_dialects()
    routes = _build_routes(
        dialects,
        generate,
        models,
        live or LiveSettings(settings),
        counted,
        workers or ThreadPools(),
        lag or EventLoopLag(),
        usage or UsageCounters(),
        limits,
        observers,
    )
    app = _Application(
        routes=routes,
        # CORS precedes authentication, because browsers send no key with a preflight, and an
        # allowed page may also read the error response
        outer_middleware=[
            Middleware(_ShortPathMiddleware, routes),
            Middleware(
                RequestIdMiddleware,
                counted,
                [dialect.ERRORS for dialect in dialects if hasattr(dialect, "ERRORS")],
                strict_fields=settings.strict_fields,
            ),
            Middleware(HostCheckMiddleware, AllowedHosts.from_settings(settings)),
            _cors_middleware(settings),
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
    # A path with a trailing slash is not redirected, because most clients would lose the body on a
    # redirect.
    app.router.redirect_slashes = False
    return app


async def _handle_app_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)
    return error_response(error)


async def _handle_disconnect(request: Request, error: Exception) -> Response:
    """Builds a response that is never sent. Its status code, nginx's 499, appears in the access
    log."""
    return Response(status_code=499)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    """Handles unknown paths and wrong methods, the only errors raised by the router itself."""
    assert isinstance(error, HTTPException)
    where = f"{request.method[:20]} {quote_value(request.url.path)}"
    if error.status_code == 405:
        allowed = ", ".join(_find_methods(request, request.scope["path"]))
        refusal = AppError(
            ErrorKind.METHOD_NOT_ALLOWED,
            f"method not allowed: {where}; this endpoint accepts {allowed}",
        )
        return error_response(refusal, headers={"Allow": allowed})
    assert error.status_code == 404
    return error_response(
        AppError(ErrorKind.NOT_FOUND, f"no such endpoint: {where}; {_advise(request)}")
    )


def _find_methods(request: Request, path: str) -> list[str]:
    """Returns the methods that the path accepts. Several routes may have the same path."""
    scope = {**request.scope, "path": path}
    routes: Sequence[BaseRoute] = request.app.routes
    found = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
    return sorted({name for one in found if isinstance(one, Route) for name in one.methods or ()})


def _advise(request: Request) -> str:
    """Returns the advice in the message for an unknown path."""
    path: str = request.scope["path"]
    if path.endswith("/") and _find_methods(request, path.rstrip("/")):
        return "remove the trailing slash"
    return "/docs lists all endpoints"


async def _handle_unexpected(request: Request, error: Exception) -> Response:
    """Handles an unexpected exception. Starlette re-raises it so that the server logs it; the
    response therefore contains no details."""
    message = "internal error: see the server's log"
    return error_response(AppError(ErrorKind.ENGINE, message, code="internal_error"))


def _build_routes(
    dialects: Sequence[Any],
    generate: Generate,
    models: Models,
    live: LiveSettings,
    traffic: ConnectionStats,
    workers: ThreadPools,
    lag: EventLoopLag,
    usage: UsageCounters,
    limits: RequestLimits | None,
    observers: Sequence[ObserverFactory],
) -> list[Route]:
    settings = live.current
    bodies = RequestBodies(settings, workers)
    live.subscribe(bodies.apply)
    front_end = FrontendStats(bodies, workers, lag)
    metrics = Metrics(models, traffic, front_end, usage)
    observed = ObservedGenerate(
        generate, metrics.observe, RequestContextObserver, *observers, limits=limits
    )
    found: list[Route] = [
        *health_routes(models, live, front_end),
        *engine_event_routes(models, live, front_end, traffic),
        *metrics.routes(),
        *usage_routes(usage),
    ]
    for dialect in dialects:
        found += dialect.routes(observed, models, settings, bodies)
    # Starlette tries the routes in this order, so generation routes come first
    return sorted(found, key=lambda route: "POST" not in (route.methods or ()))


def _find_dialects() -> list[Any]:
    names = pkgutil.walk_packages([str(Path(__file__).parent)], f"{__package__}.")
    modules = [import_module(module.name) for module in names]
    return [module for module in modules if callable(getattr(module, "routes", None))]
