"""Unknown paths, wrong methods, internal errors, CORS and request IDs."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.http.api_keys import ApiKey, Keyring, hash_key
from tests.api.asgi import Conversation, Reply, send_request
from tests.fakes import CARD, FakeGenerate, build_fake_app
from tests.rows import rows

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", ["/v0", "/v1", "/v1/nonsense", "/documents", CHAT + "/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unknown_path_is_not_found(call: Any, method: str, path: str):
    reply = call(method, path)
    assert reply.status == 404
    assert reply.error["code"] == "not_found"
    assert path in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        (CHAT + "/", "remove the trailing slash"),
        ("/api/chat/", "remove the trailing slash"),
        ("/v1/nonsense", "/docs lists all endpoints"),
        ("/chat/nonsense", "/docs lists all endpoints"),
    ],
)
def test_the_message_for_an_unknown_path_says_what_to_do(call: Any, path: str, advice: str):
    assert advice in call("POST", path).body.decode()


@rows(
    ("path", "status"),
    [
        ("/chat/completions", 200),
        ("/models", 405),
        ("/models/fake/model", 405),
        ("/messages", 400),
        ("/responses", 400),
        ("/health", 405),
        ("/v1/health", 405),
        ("/v1/v1/models", 404),
    ],
)
def test_v1_may_be_left_out_of_a_path(path: str, status: int):
    """llama.cpp serves both. A path with its own route, such as /health, is not changed."""
    reply = send_request(FakeGenerate(), "POST", path, {"messages": HI})
    assert reply.status == status


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/fake/model", "GET, HEAD"),
        ("OPTIONS", CHAT, "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("GET", "/completion", "POST"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
    ],
)
def test_a_wrong_method_gets_the_allowed_ones(call: Any, method: str, path: str, expected: str):
    reply = call(method, path)
    assert reply.status == 405
    assert reply.headers["allow"] == expected
    assert reply.error["code"] == "method_not_supported"


def test_models_are_listed_and_found_by_ids_with_slashes(call: Any):
    listed = call("GET", "/v1/models").json
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model == {
        "id": "fake/model",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "mlxrunner",
        "context_length": 4096,
        "input_modalities": ["text"],
        "max_model_len": 4096,
        "state": "ready",
        "progress": None,
        "pinned": False,
        "memory": 123_456,
        "expires_at": None,
        "error": None,
    }
    assert call("GET", "/v1/models/fake/model").json == model


def test_only_administrators_see_the_folder_of_a_model(call: Any, generate: FakeGenerate):
    generate.cards = (replace(CARD, folder=Path("/models/a")),)
    listed = call("GET", "/v1/models").json["data"]
    assert [model["root"] for model in listed] == ["/models/a"]
    keyring = Keyring((ApiKey(name="ada", digest=hash_key("a" * 32)),))
    headers = {"authorization": f"Bearer {'a' * 32}"}

    async def list_models() -> Reply:
        app = build_fake_app(generate, Settings(), keyring=keyring)
        return await Conversation(app, "GET", "/v1/models", b"", headers).end()

    reply = asyncio.run(list_models())
    assert reply.status == 200
    assert "root" not in reply.json["data"][0]


def test_models_are_rescanned_for_unknown_names(call: Any, generate: FakeGenerate):
    for method, path, body in [
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/a/b", None),
        ("POST", CHAT, {"model": "c/d"}),
        ("POST", "/v1/embeddings", {"model": "e/f"}),
        ("POST", "/v1/models/load", {"model": "fake/model"}),
    ]:
        call(method, path, body)
    assert generate.rescans == 1
    assert generate.resolved == ["a/b", "c/d", "e/f", "fake/model"]


@pytest.mark.parametrize("name", ["fake", "none", "../etc", "a" * 3000, ""])
def test_a_model_that_is_not_served_is_not_found(call: Any, name: str):
    reply = call("GET", f"/v1/models/{name}")
    assert reply.status == 404
    assert (reply.error["code"], reply.error["param"]) == ("model_not_found", "model")
    assert len(reply.error["message"]) < 400


def test_an_internal_error_gets_a_reply_without_details():
    async def run() -> Reply:
        generate = FakeGenerate(open_error=KeyError("secret"))
        body = json.dumps({"model": "fake/model", "messages": HI}).encode()
        app = build_fake_app(generate, Settings())
        conversation = Conversation(app, "POST", CHAT, body)
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
# @anthropic-ai/sdk with dangerouslyAllowBrowser
ANTHROPIC_SDK = (
    ",anthropic-version,anthropic-beta,anthropic-dangerous-direct-browser-access,x-api-key,"
    "x-stainless-helper"
)


def preflight(call: Any, origin: str, more: str = "", **settings: Any) -> Reply:
    return call(
        "OPTIONS",
        CHAT,
        b"",
        {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": SDK_IN_A_BROWSER + more,
        },
        **settings,
    )


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://127.0.0.1",
        "http://[::1]:8080",
        "app://obsidian.md",
        "tauri://localhost",
        "vscode-webview://1f5e3k0",
        "vscode-file://vscode-app",
    ],
)
def test_local_origins_are_allowed(call: Any, origin: str):
    reply = preflight(call, origin)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == origin
    assert "access-control-allow-credentials" not in reply.headers
    assert call("GET", "/health", None, {"origin": origin}).headers[
        "access-control-allow-origin"
    ] == (origin)


def test_a_page_may_send_the_headers_of_openrouters_clients(call: Any):
    more = ",http-referer,x-title,x-requested-with"
    assert preflight(call, "http://localhost:3000", more).status == 200


def test_a_page_may_use_anthropics_sdk(call: Any):
    origin = "http://localhost:3000"
    assert preflight(call, origin, ANTHROPIC_SDK).status == 200
    shown = call("GET", "/health", None, {"origin": origin}).headers
    readable = shown["access-control-expose-headers"].lower().split(", ")
    assert {"request-id", "x-should-retry", "retry-after"} <= {*readable}


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://localhost.evil.example",
        "null",
        "file://",
        "app://",
        "http://app://x",
        "xapp://y",
    ],
)
def test_other_origins_are_rejected(call: Any, origin: str):
    """As in llama.cpp, browsers are stopped by the missing header, not by the status."""
    assert preflight(call, origin).status == 200
    assert "access-control-allow-origin" not in preflight(call, origin).headers


def test_more_origins_can_be_allowed(call: Any):
    origin = "https://chat.example"
    assert preflight(call, origin, cors_origins=(origin,)).status == 200


def test_an_asterisk_allows_each_origin_by_its_name(call: Any):
    reply = preflight(call, "https://chat.example", cors_origins=("*",))
    assert reply.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-credentials" not in reply.headers


def test_errors_have_cors_headers(call: Any):
    reply = call("POST", CHAT, {}, {"origin": "http://localhost:3000"})
    assert reply.status == 400
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"


@rows(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/metrics", None, 200),
        ("GET", "/nowhere", None, 404),
        ("PUT", CHAT, None, 405),
        ("POST", CHAT, {}, 400),
        ("POST", CHAT, b"{", 400),
        ("POST", CHAT, {"model": "none", "messages": HI}, 404),
        ("POST", CHAT, {"model": "fake/model", "messages": HI}, 200),
        ("POST", CHAT, {"model": "fake/model", "messages": HI, "stream": True}, 200),
        ("POST", "/completion", {"prompt": "hi", "options": {}}, 200),
    ],
)
def test_every_response_has_a_request_id(call: Any, method: str, path: str, body: Any, status: int):
    replies = [call(method, path, body) for _ in range(2)]
    assert [reply.status for reply in replies] == [status] * 2
    first, second = (reply.headers["x-request-id"] for reply in replies)
    assert re.fullmatch("req_[0-9a-f]{32}", first)
    assert first != second


def test_a_request_may_have_a_request_id(call: Any):
    for name in ("my-request/7", "x" * 128):
        reply = call("GET", "/nowhere", None, {"X-Request-ID": name})
        assert reply.headers["x-request-id"] == name


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "é", "a\tb", "a\x7f"])
def test_an_invalid_request_id_is_replaced(call: Any, name: str):
    reply = call("GET", "/health", None, {"X-Request-ID": name})
    assert reply.headers["x-request-id"].startswith("req_")


def test_an_internal_error_is_logged_and_has_cors_headers(
    caplog: pytest.LogCaptureFixture,
):
    async def run() -> Reply:
        app = build_fake_app(FakeGenerate(open_error=KeyError("secret")), Settings())
        body = json.dumps({"model": "fake/model", "messages": HI}).encode()
        headers = {"origin": "http://localhost:3000", "x-request-id": "mine"}
        conversation = Conversation(app, "POST", CHAT, body, headers)
        with pytest.raises(KeyError):
            await conversation.end()
        return conversation.reply

    reply = asyncio.run(run())
    assert reply.headers["x-request-id"] == "mine"
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
    [line] = caplog.messages
    assert line.startswith(f"POST {CHAT} 500 ms=")
    assert " finish=internal_error error=internal_error reason=" in line


@pytest.mark.parametrize(
    ("kind", "logged"),
    [(ErrorKind.ENGINE, 1), (ErrorKind.LOADING, 0), (ErrorKind.BUSY, 0), (ErrorKind.INVALID, 0)],
)
def test_only_errors_of_the_engine_are_logged(
    kind: ErrorKind, logged: int, caplog: pytest.LogCaptureFixture
):
    generate = FakeGenerate(open_error=AppError(kind, "what"))
    reply = send_request(generate, "POST", CHAT, {"model": "fake/model", "messages": HI})
    assert reply.status >= 400
    assert len(caplog.messages) == logged


def test_cors_exposes_the_request_id_and_retry_after(call: Any):
    reply = call("GET", "/health", None, {"origin": "http://localhost:3000"})
    exposed = reply.headers["access-control-expose-headers"].lower().split(", ")
    assert {"x-request-id", "retry-after", "x-mlxrunner-notice"} <= {*exposed}
    assert preflight(call, "http://localhost:3000", more=",x-request-id").status == 200
