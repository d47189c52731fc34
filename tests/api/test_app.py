"""What surrounds the routes: unknown paths, wrong methods, faults of ours, other origins."""

import asyncio
import json
from typing import Any

import pytest

from app.api.app import build_app
from app.core.settings import Settings
from tests.api.asgi import Conversation, Reply
from tests.fakes import FakeGenerate

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nonsense", "/docs", CHAT + "/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unknown_path_is_not_found(call: Any, method: str, path: str):
    reply = call(method, path)
    assert reply.status == 404
    assert reply.error["code"] == "not_found"
    assert path in reply.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/fake/model", "GET, HEAD"),
        ("OPTIONS", CHAT, "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("GET", "/completion", "POST"),
    ],
)
def test_a_wrong_method_is_told_the_right_one(call: Any, method: str, path: str, allowed: str):
    reply = call(method, path)
    assert reply.status == 405
    assert reply.headers["allow"] == allowed
    assert reply.error["code"] == "method_not_supported"


def test_models_are_listed_and_found_by_an_id_with_a_slash(call: Any):
    listed = call("GET", "/v1/models").json
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model == {
        "id": "fake/model",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "mlxrunner",
        "context_length": 4096,
    }
    assert call("GET", "/v1/models/fake/model").json == model


@pytest.mark.parametrize("name", ["fake", "none", "../etc", "a" * 3000, ""])
def test_a_model_that_is_not_served_is_not_found(call: Any, name: str):
    reply = call("GET", f"/v1/models/{name}")
    assert reply.status == 404
    assert (reply.error["code"], reply.error["param"]) == ("model_not_found", "model")
    assert len(reply.error["message"]) < 400


def test_a_fault_of_ours_has_a_reply_without_details():
    async def run() -> Reply:
        generate = FakeGenerate(refusal=KeyError("secret"))
        ask = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}
        app = build_app(generate, Settings())
        conversation = Conversation(app, "POST", CHAT, json.dumps(ask).encode())
        with pytest.raises(KeyError):  # for the server to log
            await conversation.end()
        return conversation.reply

    reply = asyncio.run(run())
    assert reply.status == 500
    assert reply.error["type"] == "api_error"
    assert b"secret" not in reply.body


SDK_IN_A_BROWSER = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,"
    "x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,"
    "x-stainless-runtime-version,x-stainless-timeout"
)


def preflight(call: Any, origin: str, **settings: Any) -> Reply:
    return call(
        "OPTIONS",
        CHAT,
        b"",
        {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": SDK_IN_A_BROWSER,
        },
        **settings,
    )


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080"]
)
def test_pages_of_this_machine_may_call(call: Any, origin: str):
    reply = preflight(call, origin)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == origin
    assert "access-control-allow-credentials" not in reply.headers
    assert call("GET", "/health", None, {"origin": origin}).headers[
        "access-control-allow-origin"
    ] == (origin)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://localhost.evil.example", "null", "file://"]
)
def test_pages_from_elsewhere_may_not(call: Any, origin: str):
    assert preflight(call, origin).status == 400
    assert "access-control-allow-origin" not in preflight(call, origin).headers


def test_further_origins_can_be_let_in(call: Any):
    origin = "https://chat.example"
    assert preflight(call, origin, cors_origins=(origin,)).status == 200


def test_errors_reach_pages_that_may_call(call: Any):
    reply = call("POST", CHAT, {}, {"origin": "http://localhost:3000"})
    assert reply.status == 400
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
