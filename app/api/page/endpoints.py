"""The web page at `/`, the API reference at `/docs`, and the files of both.

Knows: the files in app/api/page/static, their media types, the security headers of a page. Must not
know: the content of the files, the API that the page calls. The vendor-* files are unmodified
libraries; vendored.toml lists their versions and hashes.

The files are read once, at start. They contain no secrets and no data of this server, so they
require no key (app/http/auth.py). The page itself calls the API like every other client.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.core.ports import Generate, Models
from app.core.settings import Settings
from app.http.body import RequestBodies

STATIC = Path(__file__).parent / "static"

# In the source tree, and in the same place within the wheel (deploy/wheel/backend.py).
OPENAPI = Path(__file__).parents[3] / "openapi.yaml"

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".toml": "application/toml; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json; charset=utf-8",
    ".yaml": "application/yaml; charset=utf-8",
}

# The browser loads nothing from other servers, runs no inline script, and sends data only to this
# server. No other page can frame this one.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

# Browsers ask again on each load, so that a new version of the server is never mixed with old
# files. The response is then 304, unless the file has changed.
_CACHE_CONTROL = "no-cache"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page in memory."""

    content: bytes
    media_type: str
    etag: str

    @staticmethod
    def read(path: Path) -> "StaticFile":
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:32]
        return StaticFile(content, MEDIA_TYPES[path.suffix], f'"{digest}"')

    def respond(self, request: Request) -> Response:
        headers = {**SECURITY_HEADERS, "Cache-Control": _CACHE_CONTROL, "ETag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    files = {path.name: StaticFile.read(path) for path in sorted(STATIC.iterdir())}
    page = files["index.html"]

    async def root(request: Request) -> Response:
        response = page.respond(request) if accepts_html(request) else _greet_client()
        response.headers["Vary"] = "Accept"
        return response

    async def static(request: Request) -> Response:
        file = files.get(request.path_params["name"])
        if file is None:
            raise HTTPException(404)
        return file.respond(request)

    return [
        Route("/", root, methods=["GET"]),
        Route("/docs", _make_handler(files["docs.html"]), methods=["GET"]),
        Route("/openapi.yaml", _make_handler(StaticFile.read(OPENAPI)), methods=["GET"]),
        Route("/page/{name}", static, methods=["GET"]),
    ]


def accepts_html(request: Request) -> bool:
    """Returns whether the client names text/html. Browsers do; curl and the clients of Ollama send
    `*/*` or nothing."""
    ranges = request.headers.get("accept", "").lower().split(",")
    return any(one.partition(";")[0].strip() == "text/html" for one in ranges)


def _greet_client() -> Response:
    """Returns Ollama's text at `/`, which launchers and editors check."""
    return PlainTextResponse("Ollama is running")


def _make_handler(file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return file.respond(request)

    return handle
