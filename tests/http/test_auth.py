"""Authorization: every route without a key, with a wrong key, and with each kind of valid key."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from app.core.settings import Settings
from app.http.api_keys import ApiKey, Keyring, generate_key, hash_key
from app.http.auth import AccessLevel, extract_keys, required_access
from tests.api.asgi import Conversation, Reply
from tests.fakes import FakeGenerate, build_fake_app
from tests.rows import rows

USER, ADMIN = generate_key(), generate_key()
KEYS = (
    ApiKey(name="laptop", digest=hash_key(USER)),
    ApiKey(name="boss", digest=hash_key(ADMIN), admin=True),
)
CHAT = "/v1/chat/completions"
HI = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}


def build_app(generate: FakeGenerate | None = None, keys: Sequence[ApiKey] = KEYS) -> Starlette:
    return build_fake_app(generate or FakeGenerate(), Settings(), keyring=Keyring(tuple(keys)))


def send(
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    target: Starlette | None = None,
) -> Reply:
    async def run() -> Reply:
        data = json.dumps(body).encode()
        return await Conversation(target or build_app(), method, path, data, headers).end()

    return asyncio.run(run())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def list_routes() -> list[tuple[str, str]]:
    """Method and path of every route, with example names filled in."""
    routes: set[tuple[str, str]] = set()
    for route in build_app().routes:
        assert isinstance(route, Route)
        path = route.path.replace("{id:path}", "fake/model").replace("{response_id}", "resp_1")
        path = path.replace("{digest}", f"sha256:{'0' * 64}").replace("{name}", "app.js")
        routes |= {(method, path) for method in route.methods or ()}
    return sorted(routes)


def get_message(reply: Reply, code: str) -> str:
    """The message of an error, whose dialect may have no codes."""
    if isinstance(reply.error, str):
        return reply.error
    assert reply.error.get("code", code) == code
    return reply.error["message"]


PAGE_PATHS = ("/", "/docs", "/openapi.yaml", "/page/app.js")

# All other routes need a key; have a reason before you add a line.
WITHOUT_KEY = {
    ("GET", "/health"),
    ("HEAD", "/health"),
    ("GET", "/v1/health"),
    ("HEAD", "/v1/health"),
    ("GET", "/v1/status"),
    ("HEAD", "/v1/status"),
    # the page, which asks for a key itself, and its files, which are the same on every server
    *((method, path) for method in ("GET", "HEAD") for path in PAGE_PATHS),
}
WITH_ADMIN = {
    ("GET", "/metrics"),
    ("HEAD", "/metrics"),
    ("POST", "/v1/models/defaults"),
    ("POST", "/v1/models/load"),
    ("POST", "/v1/models/preview"),
    ("POST", "/v1/models/unload"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    # whatever changes the disk or uses the network
    ("POST", "/api/pull"),
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("HEAD", f"/api/blobs/sha256:{'0' * 64}"),
    ("POST", f"/api/blobs/sha256:{'0' * 64}"),
}


def test_the_lists_name_only_routes_that_exist():
    assert set(list_routes()) >= WITHOUT_KEY | WITH_ADMIN


@rows(("method", "path"), list_routes())
def test_each_route_without_a_key(method: str, path: str):
    reply = send(method, path, {})
    if (method, path) in WITHOUT_KEY:
        assert reply.status == 200
        return
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == 'Bearer realm="mlxrunner"'
    assert reply.headers["x-request-id"]
    assert "Authorization: Bearer" in get_message(reply, "missing_api_key")


@rows(("method", "path"), list_routes())
def test_each_route_with_an_unknown_key(method: str, path: str):
    wrong = generate_key()
    reply = send(method, path, {}, bearer(wrong))
    if (method, path) in WITHOUT_KEY:
        assert reply.status == 200
        return
    assert reply.status == 401
    assert reply.headers["www-authenticate"].endswith('error="invalid_token"')
    assert get_message(reply, "invalid_api_key")
    assert wrong.encode() not in reply.body


@rows(("method", "path"), list_routes())
def test_each_route_with_a_key(method: str, path: str):
    reply = send(method, path, {}, bearer(USER))
    if (method, path) not in WITH_ADMIN:
        assert reply.status not in (401, 403)
        return
    assert reply.status == 403
    assert reply.headers["www-authenticate"].endswith('error="insufficient_scope"')
    assert "laptop" in get_message(reply, "insufficient_scope")
    assert USER.encode() not in reply.body


@rows(("method", "path"), list_routes())
def test_each_route_with_an_admin_key(method: str, path: str):
    assert send(method, path, {}, bearer(ADMIN)).status not in (401, 403)


@rows(("method", "path"), list_routes())
def test_each_route_if_no_keys_are_configured(method: str, path: str):
    """Clients that always send a key are also accepted."""
    for headers in ({}, bearer("none")):
        assert send(method, path, {}, headers, target=build_app(keys=())).status not in (401, 403)


@rows(
    "path",
    [
        "/nowhere",
        "/page",
        "/docs/",
        "/v1/engine/events/",
        "/health/",
        "/Metrics",
        "//health",
        "/v1/",
    ],
)
@rows("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_unknown_paths_do_not_differ_without_a_key(method: str, path: str):
    assert send(method, path).status == 401


@rows("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
@rows("path", ["/health", "/v1/status", *PAGE_PATHS])
def test_only_get_and_head_are_allowed_without_a_key(method: str, path: str):
    assert required_access(method, path) == AccessLevel.KEY
    assert send(method, path).status == 401


def test_admin_paths_need_an_admin_key_for_every_method():
    for method in ("GET", "PUT", "OPTIONS", "PATCH"):
        for path in ("/metrics", "/v1/models/load", "/v1/models/unload"):
            assert required_access(method, path) == AccessLevel.ADMIN


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {USER}"},
        {"authorization": f"bearer   {USER} "},
        {"x-api-key": USER},
        {"x-api-key": USER, "authorization": "Bearer none"},
        {"authorization": f"Bearer {USER}", "x-api-key": "none"},
    ],
)
def test_a_key_is_accepted_in_two_headers(headers: dict[str, str]):
    assert send("POST", CHAT, HI, headers).status == 200


@rows(
    "headers",
    [
        {"authorization": USER},
        {"authorization": f"Basic {USER}"},
        {"authorization": f"Token {USER}"},
        {"authorization": "Bearer"},
        {"authorization": ""},
        {"authorization": f"Bearer {USER} {USER}"},
        {"authorization": f"Bearer {USER},"},
        {"authorization": f'Bearer "{USER}"'},
        {"authorization": f"Bearer {hash_key(USER).hex()}"},
        {"authorization": f"Bearer {USER[:-1]}"},
        {"x-api-key": ""},
        {"api-key": USER},
        {"cookie": f"authorization=Bearer {USER}"},
    ],
)
def test_other_headers_and_schemes_are_no_keys(headers: dict[str, str]):
    assert send("POST", CHAT, HI, headers).status == 401
    assert send("GET", f"/v1/models?api_key={USER}&key={USER}").status == 401


def test_duplicate_headers_are_ignored():
    twice = [(b"authorization", f"Bearer {USER}".encode())] * 2
    assert extract_keys(twice) == []
    assert extract_keys([*twice, (b"x-api-key", b"other")]) == ["other"]


def test_non_ascii_headers_are_no_valid_keys():
    assert extract_keys([(b"x-api-key", b"\xff\xfe")]) == ["ÿþ"]
    assert send("GET", "/v1/models", None, {"x-api-key": "\u00e9\u00e9"}).status == 401


def get_request_state(scopes: list[Any], keys: Sequence[ApiKey], headers: dict[str, str]) -> Any:
    """The request state that an endpoint sees."""
    from app.http.auth import AuthMiddleware

    async def respond(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    middleware = AuthMiddleware(respond, Keyring(tuple(keys)))
    send("GET", "/v1/status", None, headers, target=middleware)  # pyright: ignore[reportArgumentType]
    return scopes[-1]["state"]


def test_endpoints_see_the_caller_but_not_the_key():
    scopes: list[Any] = []
    assert get_request_state(scopes, KEYS, {}) == {"caller": "", "admin": False}
    assert get_request_state(scopes, KEYS, bearer("wrong")) == {"caller": "", "admin": False}
    assert get_request_state(scopes, KEYS, bearer(USER)) == {"caller": "laptop", "admin": False}
    assert get_request_state(scopes, KEYS, {"x-api-key": ADMIN}) == {
        "caller": "boss",
        "admin": True,
    }
    assert get_request_state(scopes, (), bearer("sk-of-somebody-else")) == {
        "caller": "",
        "admin": True,
    }
    for scope in scopes:
        assert {b"authorization", b"x-api-key"}.isdisjoint(name for name, _ in scope["headers"])


def test_a_request_without_a_valid_key_is_rejected_before_its_body():
    async def run() -> Reply:
        conversation = Conversation(build_app(), "POST", CHAT, None, bearer("wrong"))
        return await conversation.end()  # which would wait forever for the body

    assert asyncio.run(run()).status == 401


def test_an_allowed_origin_can_preflight_and_read_the_401():
    """A browser sends no key with a preflight."""
    origin = {"origin": "http://localhost:3000"}
    method = {"access-control-request-method": "POST"}
    header_names = {"access-control-request-headers": "authorization,content-type,x-api-key"}
    preflight = send("OPTIONS", CHAT, None, {**origin, **method, **header_names})
    assert preflight.status == 200
    # Chrome's preflight for requests from the public network to a private address
    private_network = {"access-control-request-private-network": "true"}
    allowed = send("OPTIONS", CHAT, None, {**origin, **method, **private_network})
    assert allowed.headers["access-control-allow-private-network"] == "true"
    evil = {"origin": "https://evil.example", **method, **private_network}
    rejected = send("OPTIONS", CHAT, None, evil)
    assert "access-control-allow-origin" not in rejected.headers
    reply = send("POST", CHAT, HI, origin)
    assert reply.status == 401
    assert reply.headers["access-control-allow-origin"] == origin["origin"]


def test_rejected_requests_log_no_keys(caplog: pytest.LogCaptureFixture):
    wrong = generate_key()
    with caplog.at_level(logging.DEBUG):
        send("POST", CHAT, HI, bearer(wrong))
        send("POST", "/v1/models/load", {"model": "x"}, bearer(USER))
    assert wrong not in caplog.text
    assert USER not in caplog.text


def test_a_removed_key_is_rejected_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from app.http import api_keys
    from tests.http.test_api_keys import write
    from tests.http.test_api_keys_file import entry

    monkeypatch.setattr(api_keys, "_RELOAD_INTERVAL", 0.0)
    file = tmp_path / "keys.toml"
    write(file, entry("laptop", USER) + entry("boss", ADMIN, "admin = true"))
    server = build_fake_app(FakeGenerate(), Settings(), keyring=Keyring(file=file))
    assert send("GET", "/v1/models", None, bearer(USER), target=server).status == 200
    assert send("GET", "/metrics", None, bearer(ADMIN), target=server).status == 200
    write(file, entry("boss", ADMIN))
    assert send("GET", "/v1/models", None, bearer(USER), target=server).status == 401
    assert send("GET", "/metrics", None, bearer(ADMIN), target=server).status == 403


def test_an_expired_key_is_rejected_with_the_reason():
    now = time.time()
    expired, later = (
        ApiKey(name="laptop", digest=hash_key(key), admin=True, expires=now + seconds)
        for key, seconds in ((USER, -1.0), (ADMIN, 3600.0))
    )
    app = build_app(keys=(expired, later))
    reply = send("GET", "/v1/models", headers=bearer(USER), target=app)
    assert (reply.status, reply.error["code"]) == (401, "expired_api_key")
    assert "the API key of laptop expired at 20" in reply.error["message"]
    assert 'error="invalid_token"' in reply.headers["www-authenticate"]
    assert send("GET", "/v1/models", headers=bearer(ADMIN), target=app).status == 200
    # as without a key
    status = send("GET", "/v1/status", headers=bearer(USER), target=app)
    assert status.status == 200
    assert "Models" not in status.json
