"""Paths without /v1, as clients of llama.cpp send them: /chat/completions is /v1/chat/completions.

Knows: the patterns of the routes. Must not know: dialects, what a route does.

The path is rewritten before everything else, so that authorization, error formats and the access
log see only the path of the route.
"""

from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/v1"


class ShortPathMiddleware:
    """ASGI middleware that adds /v1 to the path of a request, if there is a route for the longer
    path and none for the path itself. Place it outermost."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._patterns = [route.path_regex for route in routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if not path.startswith(f"{PREFIX}/") and self._is_short(path):
                raw = PREFIX.encode() + scope.get("raw_path", path.encode())
                scope = {**scope, "path": PREFIX + path, "raw_path": raw}
        await self._app(scope, receive, send)

    def _is_short(self, path: str) -> bool:
        return self._has_route(PREFIX + path) and not self._has_route(path)

    def _has_route(self, path: str) -> bool:
        return any(pattern.match(path) for pattern in self._patterns)
