"""Who may do what: keys held against what is asked for.

Knows: the headers that carry a key (RFC 6750, 2.1, and x-api-key of Anthropic's SDK and
llama.cpp's clients), which paths ask for more than a key and which for none. Must not know: where
keys come from, bodies, answers.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.wire import problem_reply
from app.core.errors import AppError, Kind
from app.door.keyring import Keyring
from app.door.keys import Key


class Need(Enum):
    """What a request must show."""

    NOTHING = "nothing"
    KEY = "key"
    ADMIN = "admin"


# Everything else needs a key, and so does what does not exist: who has none learns nothing of what
# there is. Held against the routes by tests/door/test_access.py.
_FREE_TO_READ = frozenset({"/health", "/v1/status"})
_FOR_ADMINS = frozenset({"/metrics", "/v1/models/load", "/v1/models/unload"})

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})

# RFC 6750, 3: what was wrong stands behind the scheme, and nothing where no key was shown
_CHALLENGE = 'Bearer realm="mlxrunner"'


def need(method: str, path: str) -> Need:
    """path: decoded, as the router matches it."""
    if path in _FOR_ADMINS:
        return Need.ADMIN
    if path in _FREE_TO_READ and method in ("GET", "HEAD"):
        return Need.NOTHING
    return Need.KEY


def shown_keys(headers: Sequence[tuple[bytes, bytes]]) -> Sequence[str]:
    """What may be a key in a request: one in each of the two headers, at most. A header that is
    there twice counts for nothing: proxies and servers differ in which one they believe."""
    found: list[str] = []
    for header in _CREDENTIALS:
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


class Access:
    """ASGI middleware. Tells whoever answers, in `request.state`, who asks: `caller`, the name of
    the key, and `admin`, whether it may see and do everything. Without keys everybody is nobody in
    particular ("") and may. It takes the key out of the headers, so that nobody behind it can tell
    it to anyone."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        assert scope["type"] == "http", "keys are asked for of requests only"
        try:
            allowed = await self._admitted(scope)
        except AppError as error:
            await problem_reply(error, headers=_challenge(error))(scope, receive, send)
            return
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _CREDENTIALS]
        scope.setdefault("state", {}).update(allowed)
        await self._app(scope, receive, send)

    async def _admitted(self, scope: Scope) -> Mapping[str, Any]:
        """What the state gets. Raises AppError(UNAUTHORIZED or FORBIDDEN)."""
        if not self._keyring.in_force:
            return {"caller": "", "admin": True}
        asked = need(scope["method"], scope["path"])
        shown = shown_keys(scope["headers"])
        # all of them, also behind one that is right: time tells nothing
        known = [key for text in shown if (key := await self._keyring.match(text)) is not None]
        key = known[0] if known else None
        check(asked, key, shown_any=bool(shown))
        if key is None:
            return {"caller": "", "admin": False}
        return {"caller": key.name, "admin": key.admin}


def check(asked: Need, key: Key | None, *, shown_any: bool) -> None:
    """Raises AppError(UNAUTHORIZED) without a key where one is needed, AppError(FORBIDDEN) with one
    that is not good for this. Neither tells what was shown."""
    if asked is not Need.NOTHING and key is None:
        raise AppError(
            Kind.UNAUTHORIZED,
            "invalid API key"
            if shown_any
            else "no API key was sent: send one as `Authorization: Bearer KEY`",
            code="invalid_api_key" if shown_any else "missing_api_key",
        )
    if asked is Need.ADMIN and key is not None and not key.admin:
        raise AppError(
            Kind.FORBIDDEN,
            f"the key {key.name!r} has no admin rights: this needs a key with admin = true "
            "(`mlxrunner key NAME --admin`)",
            code="insufficient_scope",
        )


def _challenge(error: AppError) -> Mapping[str, str]:
    told = {
        "missing_api_key": _CHALLENGE,
        "invalid_api_key": f'{_CHALLENGE}, error="invalid_token"',
        "insufficient_scope": f'{_CHALLENGE}, error="insufficient_scope"',
    }
    assert error.code is not None
    return {"WWW-Authenticate": told[error.code]}
