"""Authentication and authorization: API keys against the required access level.

Knows: the headers that carry a key (RFC 6750, 2.1, and x-api-key of Anthropic's SDK and llama.cpp's
clients), which paths require an admin key and which require none. Must not know: where keys come
from, bodies, responses.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from app.core.errors import AppError, ErrorKind
from app.http.api_keys import ApiKey, Keyring
from app.http.responses import error_response


class AccessLevel(Enum):
    """The access level that a request requires."""

    PUBLIC = "nothing"
    KEY = "key"
    ADMIN = "admin"


# All other paths require a key, including unknown ones, so that clients without a key cannot probe
# for paths. Checked against the routes by tests/http/test_auth.py.
_PUBLIC_PATHS = frozenset({"/health", "/v1/status"})
_ADMIN_PATHS = frozenset({"/metrics", "/v1/models/load", "/v1/models/unload"})

_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})

# RFC 6750, 3: an error code follows the scheme, but not if the client sent no key
_CHALLENGE = 'Bearer realm="mlxrunner"'


def required_access(method: str, path: str) -> AccessLevel:
    """Returns the access level. path: decoded, as the router matches it."""
    if path in _ADMIN_PATHS:
        return AccessLevel.ADMIN
    if path in _PUBLIC_PATHS and method in ("GET", "HEAD"):
        return AccessLevel.PUBLIC
    return AccessLevel.KEY


def extract_keys(headers: Sequence[tuple[bytes, bytes]]) -> Sequence[str]:
    """Returns the candidate keys of a request: at most one from each of the two headers. A repeated
    header is ignored, because proxies and servers differ in which value they use."""
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


class AuthMiddleware:
    """ASGI middleware that authenticates requests.

    Stores in `request.state`: `caller`, the name of the key, and `admin`, whether the caller has
    admin access. Without configured keys every caller has the name "" and admin access. Removes the
    key from the headers, so that the application cannot leak it.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        assert scope["type"] == "http", "keys are asked for of requests only"
        try:
            allowed = await self._authenticate(scope)
        except AppError as error:
            await error_response(error, headers=_challenge_headers(error))(scope, receive, send)
            return
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _KEY_HEADERS]
        scope.setdefault("state", {}).update(allowed)
        await self._app(scope, receive, send)

    async def _authenticate(self, scope: Scope) -> Mapping[str, Any]:
        """Returns the values for the state. Raises AppError(UNAUTHORIZED or FORBIDDEN)."""
        if not self._keyring.enabled:
            return {"caller": "", "admin": True}
        asked = required_access(scope["method"], scope["path"])
        shown = extract_keys(scope["headers"])
        # all of them, even after a match, so that the duration reveals nothing
        known = [key for text in shown if (key := await self._keyring.find(text)) is not None]
        key = known[0] if known else None
        authorize(asked, key, key_sent=bool(shown))
        if key is None:
            return {"caller": "", "admin": False}
        return {"caller": key.name, "admin": key.admin}


def authorize(required: AccessLevel, key: ApiKey | None, *, key_sent: bool) -> None:
    """Raises AppError(UNAUTHORIZED) if a key is required and missing, AppError(FORBIDDEN) if the
    key is not sufficient. Neither message contains what was sent."""
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


def _challenge_headers(error: AppError) -> Mapping[str, str]:
    told = {
        "missing_api_key": _CHALLENGE,
        "invalid_api_key": f'{_CHALLENGE}, error="invalid_token"',
        "insufficient_scope": f'{_CHALLENGE}, error="insufficient_scope"',
    }
    assert error.code is not None
    return {"WWW-Authenticate": told[error.code]}
