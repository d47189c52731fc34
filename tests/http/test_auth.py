"""Who may do what: every route without a key, with a wrong one, with each kind of right one."""

import asyncio
import json
import logging
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

USER, ADMIN = generate_key(), generate_key()
KEYS = (
    ApiKey(name="laptop", digest=hash_key(USER)),
    ApiKey(name="boss", digest=hash_key(ADMIN), admin=True),
)
CHAT = "/v1/chat/completions"
HI = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}


def app(generate: FakeGenerate | None = None, keys: Sequence[ApiKey] = KEYS) -> Starlette:
    return build_fake_app(generate or FakeGenerate(), Settings(), keyring=Keyring(tuple(keys)))


def send(
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    to: Starlette | None = None,
) -> Reply:
    async def run() -> Reply:
        data = json.dumps(body).encode()
        return await Conversation(to or app(), method, path, data, headers).end()

    return asyncio.run(run())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def routes() -> list[tuple[str, str]]:
    """Method and path of everything that there is, with names put in."""
    found: list[tuple[str, str]] = []
    for route in app().routes:
        assert isinstance(route, Route)
        path = route.path.replace("{id:path}", "fake/model").replace("{response_id}", "resp_1")
        found += [(method, path) for method in route.methods or ()]
    return sorted(found)


# Whatever else there is needs a key; who adds a line here should have thought of why.
WITHOUT_KEY = {
    ("GET", "/health"),
    ("HEAD", "/health"),
    ("GET", "/v1/status"),
    ("HEAD", "/v1/status"),
}
WITH_ADMIN = {
    ("GET", "/metrics"),
    ("HEAD", "/metrics"),
    ("POST", "/v1/models/load"),
    ("POST", "/v1/models/unload"),
}


def test_the_lists_name_only_routes_that_exist():
    assert set(routes()) >= WITHOUT_KEY | WITH_ADMIN


@pytest.mark.parametrize(("method", "path"), routes())
def test_each_route_without_a_key(method: str, path: str):
    reply = send(method, path, {})
    if (method, path) in WITHOUT_KEY:
        assert reply.status == 200
        return
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == 'Bearer realm="mlxrunner"'
    assert reply.headers["x-request-id"]
    assert reply.error["code"] == "missing_api_key"
    assert "Authorization: Bearer" in reply.error["message"]


@pytest.mark.parametrize(("method", "path"), routes())
def test_each_route_with_a_key_that_nobody_has(method: str, path: str):
    wrong = generate_key()
    reply = send(method, path, {}, bearer(wrong))
    if (method, path) in WITHOUT_KEY:
        assert reply.status == 200
        return
    assert reply.status == 401
    assert reply.headers["www-authenticate"].endswith('error="invalid_token"')
    assert reply.error["code"] == "invalid_api_key"
    assert wrong.encode() not in reply.body


@pytest.mark.parametrize(("method", "path"), routes())
def test_each_route_with_a_key(method: str, path: str):
    reply = send(method, path, {}, bearer(USER))
    if (method, path) not in WITH_ADMIN:
        assert reply.status not in (401, 403)
        return
    assert reply.status == 403
    assert reply.headers["www-authenticate"].endswith('error="insufficient_scope"')
    assert reply.error["code"] == "insufficient_scope"
    assert "laptop" in reply.error["message"]
    assert USER.encode() not in reply.body


@pytest.mark.parametrize(("method", "path"), routes())
def test_each_route_with_a_key_of_an_admin(method: str, path: str):
    assert send(method, path, {}, bearer(ADMIN)).status not in (401, 403)


@pytest.mark.parametrize(("method", "path"), routes())
def test_each_route_where_there_are_no_keys(method: str, path: str):
    """Also for clients which send one because they always do."""
    for headers in ({}, bearer("none")):
        assert send(method, path, {}, headers, to=app(keys=())).status not in (401, 403)


@pytest.mark.parametrize("path", ["/", "/nowhere", "/health/", "/Metrics", "//health", "/v1/"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_who_has_no_key_does_not_learn_what_there_is_not(method: str, path: str):
    assert send(method, path).status == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
@pytest.mark.parametrize("path", ["/health", "/v1/status"])
def test_only_reading_is_free(method: str, path: str):
    assert required_access(method, path) == AccessLevel.KEY
    assert send(method, path).status == 401


def test_other_methods_ask_for_no_less():
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
def test_a_key_may_come_in_two_headers(headers: dict[str, str]):
    assert send("POST", CHAT, HI, headers).status == 200


@pytest.mark.parametrize(
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
def test_nothing_else_is_a_key(headers: dict[str, str]):
    assert send("POST", CHAT, HI, headers).status == 401
    assert send("GET", f"/v1/models?api_key={USER}&key={USER}").status == 401


def test_a_header_that_is_there_twice_counts_for_nothing():
    twice = [(b"authorization", f"Bearer {USER}".encode())] * 2
    assert extract_keys(twice) == []
    assert extract_keys([*twice, (b"x-api-key", b"other")]) == ["other"]


def test_what_is_no_latin_letter_is_no_key():
    assert extract_keys([(b"x-api-key", b"\xff\xfe")]) == ["ÿþ"]
    assert send("GET", "/v1/models", None, {"x-api-key": "\u00e9\u00e9"}).status == 401


def noted(scopes: list[Any], keys: Sequence[ApiKey], headers: dict[str, str]) -> Any:
    """What whoever answers gets to know."""
    from app.http.auth import AuthMiddleware

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    door = AuthMiddleware(answer, Keyring(tuple(keys)))
    send("GET", "/v1/status", None, headers, to=door)  # pyright: ignore[reportArgumentType]
    return scopes[-1]["state"]


def test_whoever_answers_is_told_who_asks_and_not_with_what():
    scopes: list[Any] = []
    assert noted(scopes, KEYS, {}) == {"caller": "", "admin": False}
    assert noted(scopes, KEYS, bearer("wrong")) == {"caller": "", "admin": False}
    assert noted(scopes, KEYS, bearer(USER)) == {"caller": "laptop", "admin": False}
    assert noted(scopes, KEYS, {"x-api-key": ADMIN}) == {"caller": "boss", "admin": True}
    assert noted(scopes, (), bearer("sk-of-somebody-else")) == {"caller": "", "admin": True}
    for scope in scopes:
        assert {b"authorization", b"x-api-key"}.isdisjoint(name for name, _ in scope["headers"])


def test_a_body_is_not_waited_for_before_the_answer_is_no():
    async def run() -> Reply:
        conversation = Conversation(app(), "POST", CHAT, None, bearer("wrong"))
        return await conversation.end()  # which would wait for ever for the body

    assert asyncio.run(run()).status == 401


def test_a_page_that_may_call_can_ask_first_and_read_the_refusal():
    """A browser sends no key with a preflight."""
    origin = {"origin": "http://localhost:3000"}
    asked = {"access-control-request-method": "POST"}
    names = {"access-control-request-headers": "authorization,content-type,x-api-key"}
    preflight = send("OPTIONS", CHAT, None, {**origin, **asked, **names})
    assert preflight.status == 200
    # Chrome's question whether a page of the network may reach into this machine
    near = {"access-control-request-private-network": "true"}
    allowed = send("OPTIONS", CHAT, None, {**origin, **asked, **near})
    assert allowed.headers["access-control-allow-private-network"] == "true"
    strange = {"origin": "https://evil.example", **asked, **near}
    assert send("OPTIONS", CHAT, None, strange).status == 400
    refused = send("POST", CHAT, HI, origin)
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == origin["origin"]


def test_refusals_write_nothing_that_was_sent_into_the_log(caplog: pytest.LogCaptureFixture):
    wrong = generate_key()
    with caplog.at_level(logging.DEBUG):
        send("POST", CHAT, HI, bearer(wrong))
        send("POST", "/v1/models/load", {"model": "x"}, bearer(USER))
    assert wrong not in caplog.text
    assert USER not in caplog.text


def test_a_key_that_was_taken_away_is_refused_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from app.http import api_keys
    from tests.http.test_api_keys import write
    from tests.http.test_api_keys_file import entry

    monkeypatch.setattr(api_keys, "_RELOAD_INTERVAL", 0.0)
    file = tmp_path / "keys.toml"
    write(file, entry("laptop", USER) + entry("boss", ADMIN, "admin = true"))
    server = build_fake_app(FakeGenerate(), Settings(), keyring=Keyring(file=file))
    assert send("GET", "/v1/models", None, bearer(USER), to=server).status == 200
    assert send("GET", "/metrics", None, bearer(ADMIN), to=server).status == 200
    write(file, entry("boss", ADMIN))
    assert send("GET", "/v1/models", None, bearer(USER), to=server).status == 401
    assert send("GET", "/metrics", None, bearer(ADMIN), to=server).status == 403
