"""Authentication and authorization: API keys against the required access level.

Knows: the headers that carry a key, the paths that require an admin key, the paths that require no
key. Must not know: where keys are stored, request bodies, responses. Clients send a key in the
Authorization header (RFC 6750, 2.1), or in the x-api-key header, as Anthropic's SDK and llama.cpp's
clients do.
"""

import datetime
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from app.core.errors import AppError, ErrorKind
from app.http.api_keys import ApiKey, Keyring
from app.http.responses import error_response

# All other paths require a key, including unknown ones, so that clients without a key cannot probe
# for paths. tests/http/test_auth.py compares this table with the routes.
_PUBLIC_PATHS = frozenset({"/health", "/v1/health", "/v1/status", "/", "/docs", "/openapi.yaml"})
# the files of the page, which are the same on every server
_PUBLIC_PREFIX = "/page/"
_ADMIN_PATHS = frozenset(
    {
        "/metrics",
        "/v1/models/defaults",
        "/v1/models/load",
        "/v1/models/preview",
        "/v1/models/unload",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/api/pull",
        "/api/push",
        "/api/create",
        "/api/copy",
        "/api/delete",
    }
)
_ADMIN_PREFIX = "/api/blobs/"

_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})

# RFC 6750, 3: an error code follows the scheme, unless the client sent no key
_CHALLENGE = 'Bearer realm="mlxrunner"'


class AccessLevel(Enum):
    """The access level that a request requires."""

    PUBLIC = "nothing"
    KEY = "key"
    ADMIN = "admin"


def required_access(method: str, path: str) -> AccessLevel:
    """Returns the access level that a request requires. path: the decoded path, as matched by the
    router."""
    if path in _ADMIN_PATHS or path.startswith(_ADMIN_PREFIX):
        return AccessLevel.ADMIN
    public = path in _PUBLIC_PATHS or path.startswith(_PUBLIC_PREFIX)
    if public and method in ("GET", "HEAD"):
        return AccessLevel.PUBLIC
    return AccessLevel.KEY


def extract_keys(headers: Sequence[tuple[bytes, bytes]]) -> Sequence[str]:
    """Returns the candidate keys of a request, at most one from each of the two headers. A repeated
    header is ignored, because proxies and servers do not agree on which value to use."""
    found: list[str] = []
    for header in _KEY_HEADERS:
        values = [value for name, value in headers if name == header]
        if len(values) != 1:
            continue
        text = values[0].decode("latin-1").strip()
        if header == b"authorization":
            scheme, _, text = text.partition(" ")
            text = text.strip() if scheme.lower() == "bearer" else ""
        if text:
            found.append(text)
    return found


def get_caller(scope: Scope) -> str:
    """Returns the name of the caller's API key, or "" if the server uses no keys."""
    return scope.get("state", {}).get("caller", "")


def is_admin(scope: Scope) -> bool:
    """Returns whether the caller may manage models. This requires an admin key, unless no keys are
    configured."""
    return scope.get("state", {}).get("admin", False)


class AuthMiddleware:
    """ASGI middleware that authenticates requests.

    Stores two values in `request.state`: `caller`, the name of the key, and `admin`, whether the
    caller has admin access. If no keys are configured, every caller has the name "" and admin
    access. The key is removed from the headers, so that the application cannot leak it.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        assert scope["type"] == "http", "only HTTP requests are authenticated"
        try:
            allowed = await self._authenticate(scope)
        except AppError as error:
            await error_response(error, headers=_challenge_headers(error))(scope, receive, send)
            return
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _KEY_HEADERS]
        scope.setdefault("state", {}).update(allowed)
        await self._app(scope, receive, send)

    async def _authenticate(self, scope: Scope) -> Mapping[str, Any]:
        """Returns the values for the state. Raises AppError(UNAUTHORIZED) or
        AppError(FORBIDDEN)."""
        if not self._keyring.enabled:
            return {"caller": "", "admin": True}
        required = required_access(scope["method"], scope["path"])
        shown = extract_keys(scope["headers"])
        # check all keys even after a match, so that the response time reveals nothing
        known = [key for text in shown if (key := await self._keyring.find(text)) is not None]
        key = known[0] if known else None
        if key is not None and _has_expired(key):
            if required is not AccessLevel.PUBLIC:
                raise _expired_error(key)
            key = None
        authorize(required, key, key_sent=bool(shown))
        if key is None:
            return {"caller": "", "admin": False}
        return {"caller": key.name, "admin": key.admin}


def authorize(required: AccessLevel, key: ApiKey | None, *, key_sent: bool) -> None:
    """Raises AppError(UNAUTHORIZED) if a key is required and missing, and AppError(FORBIDDEN) if
    the key does not have sufficient access. Neither message contains the key that the client
    sent."""
    if required is not AccessLevel.PUBLIC and key is None:
        raise AppError(
            ErrorKind.UNAUTHORIZED,
            "invalid API key"
            if key_sent
            else "no API key was sent: send one as `Authorization: Bearer KEY`",
            code="invalid_api_key" if key_sent else "missing_api_key",
        )
    if required is AccessLevel.ADMIN and key is not None and not key.admin:
        raise AppError(
            ErrorKind.FORBIDDEN,
            f"the key {key.name!r} has no admin rights: this needs a key with admin = true "
            "(`mlxrunner key NAME --admin`)",
            code="insufficient_scope",
        )


def _has_expired(key: ApiKey) -> bool:
    return key.expires is not None and time.time() >= key.expires


def _expired_error(key: ApiKey) -> AppError:
    assert key.expires is not None
    date = datetime.datetime.fromtimestamp(key.expires, datetime.UTC).isoformat(" ", "minutes")
    return AppError(
        ErrorKind.UNAUTHORIZED,
        f"the API key of {key.name} expired at {date.removesuffix('+00:00')} UTC: ask the operator "
        "for a new one",
        code="expired_api_key",
    )


def _challenge_headers(error: AppError) -> Mapping[str, str]:
    challenges = {
        "missing_api_key": _CHALLENGE,
        "invalid_api_key": f'{_CHALLENGE}, error="invalid_token"',
        "expired_api_key": f'{_CHALLENGE}, error="invalid_token"',
        "insufficient_scope": f'{_CHALLENGE}, error="insufficient_scope"',
    }
    assert error.code is not None
    return {"WWW-Authenticate": challenges[error.code]}
