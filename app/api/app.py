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

from app.api import routes
from app.api.fields import shown
from app.api.request_id import HEADER, RequestIds
from app.api.wire import ClientLeft, problem_reply
from app.core.errors import AppError, Kind
from app.core.loop_lag import LoopLag
from app.core.ports import Generate
from app.core.settings import LOOPBACK_ORIGINS, Settings
from app.core.traffic import Traffic
from app.core.workers import Workers
from app.door.access import Access
from app.door.hosts import AllowedHosts, HostCheck
from app.door.keyring import Keyring
from app.door.origins import AllowedOrigins, OriginCheck

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
    HEADER,
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
TOLD_HEADERS = (HEADER, "Retry-After")


class _Application(Starlette):
    """outer: middlewares that every reply passes. Starlette's own list stands within its handler of
    faults, whose replies would reach nobody of another origin, and would have no name."""

    def __init__(
        self,
        *,
        routes: Sequence[BaseRoute],
        outer: Sequence[Middleware],
        exception_handlers: Mapping[Any, Any],
        lifespan: Lifespan[Starlette] | None,
    ) -> None:
        super().__init__(routes=routes, exception_handlers=exception_handlers, lifespan=lifespan)
        self._outer = outer

    def build_middleware_stack(self) -> ASGIApp:
        app = super().build_middleware_stack()
        for middleware, arguments, options in reversed(self._outer):
            app = middleware(app, *arguments, **options)
        return app


def build_app(
    generate: Generate,
    settings: Settings,
    lifespan: Lifespan[Starlette] | None = None,
    keyring: Keyring | None = None,
    traffic: Traffic | None = None,
    workers: Workers | None = None,
    lag: LoopLag | None = None,
) -> Starlette:
    """keyring: None is one without keys. traffic: where answers are counted; None is nowhere.
    workers: None makes some. lag: the event loop's; None is one that nothing measures.
    Raises AppError(INVALID) for names and origins in settings that are none."""
    origins = AllowedOrigins.of(settings)
    counted = Traffic() if traffic is None else traffic
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_origin_regex=LOOPBACK_ORIGINS,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=SDK_HEADERS,
        expose_headers=TOLD_HEADERS,
        # a page that may call us may do so from a network that is not ours
        allow_private_network=True,
    )
    app = _Application(
        routes=routes(generate, settings, counted, workers or Workers(), lag or LoopLag()),
        # CORS before the keys: browsers send none with a preflight, and a page that may call us
        # may also read why it was refused
        outer=[
            Middleware(RequestIds, counted),
            Middleware(HostCheck, AllowedHosts.of(settings)),
            cors,
            Middleware(OriginCheck, origins),
            Middleware(Access, Keyring() if keyring is None else keyring),
        ],
        exception_handlers={
            AppError: _problem,
            ClientLeft: _nobody,
            HTTPException: _from_starlette,
            Exception: _unexpected,
        },
        lifespan=lifespan,
    )
    # A path with a slash too many is an unknown path: a redirect would lose most clients' bodies.
    app.router.redirect_slashes = False
    return app


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)
    return problem_reply(error)


async def _nobody(request: Request, error: Exception) -> Response:
    """Never sent to anyone; the status, nginx's for a client that left, is for the access log."""
    return Response(status_code=499)


async def _from_starlette(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, the only two that the router raises by itself."""
    assert isinstance(error, HTTPException)
    where = f"{request.method[:20]} {shown(request.url.path)}"
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        told = AppError(
            Kind.METHOD, f"method not allowed: {where}; this endpoint accepts {allowed}"
        )
        return problem_reply(told, headers={"Allow": allowed})
    assert error.status_code == 404
    return problem_reply(
        AppError(Kind.NOT_FOUND, f"no such endpoint: {where}; the API is under /v1")
    )


async def _unexpected(request: Request, error: Exception) -> Response:
    """A fault of ours. Starlette raises it again for the server to log, so nothing is told here
    that could only be of use to someone who may read the log."""
    told = "internal error: see the server's log"
    return problem_reply(AppError(Kind.ENGINE, told, code="internal_error"))
