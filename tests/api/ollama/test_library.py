"""Pull, create, copy, delete and blobs, at the HTTP level; tests/serving/test_model_library.py
tests the work itself."""

import asyncio
import json
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.models import LayerProgress, LibraryStep, ModelRecipe
from app.core.settings import Settings
from tests.api.asgi import Conversation, Reply
from tests.api.ollama.test_chat import lines
from tests.fakes import CARD, FOREVER, FakeGenerate, build_fake_app

LAYER = LayerProgress(digest=f"sha256:{'0123456789ab' * 5}cdef", total=10, completed=4)


def test_a_pull_reports_each_layer(generate: FakeGenerate, call):
    steps = (LibraryStep(status="pulling manifest"), LibraryStep(layer=LAYER))
    generate.library.steps = (*steps, LibraryStep(status="success"))
    first, second, last = lines(call("POST", "/api/pull", {"name": "hf.co/org/model:latest"}))
    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    assert second == {
        "status": "pulling 0123456789ab",
        "digest": LAYER.digest,
        "total": 10,
        "completed": 4,
    }
    assert generate.library.calls == [("pull", "org/model")]
    whole = call("POST", "/api/pull", {"model": "org/model", "stream": False, "insecure": True})
    assert whole.json == {"status": "success"}


def test_a_failed_pull_is_an_error(generate: FakeGenerate, call):
    missing = AppError(ErrorKind.MODEL_NOT_FOUND, "pull model manifest: file does not exist")
    generate.library.steps = (LibraryStep(status="pulling manifest"), missing)
    assert lines(call("POST", "/api/pull", {"model": "a/b"}))[-1] == {"error": missing.message}
    assert call("POST", "/api/pull", {"model": "a/b", "stream": False}).status == 404
    generate.library.steps = (AppError(ErrorKind.MODEL_FILES, "the hub is away"),)
    reply = call("POST", "/api/pull", {"model": "a/b", "stream": False})
    assert (reply.status, reply.json) == (502, {"error": "the hub is away"})


def test_a_disconnect_stops_the_pull():
    generate = FakeGenerate()
    generate.library.steps = (LibraryStep(status="pulling manifest"), FOREVER)

    async def run() -> None:
        app = build_fake_app(generate, Settings(ping=0.02))
        body = json.dumps({"model": "a/b"}).encode()
        exchange = Conversation(app, "POST", "/api/pull", body)
        reply = await exchange.until(lambda reply: reply.body.count(b"\n") >= 3)
        assert lines(reply)[1] == {"status": ""}
        exchange.disconnect()
        await exchange.end()

    asyncio.run(run())
    assert generate.library.stopped == 1


def test_a_create_request_becomes_a_recipe(generate: FakeGenerate, call):
    body = {
        "model": "poet",
        "from": "FAKE/model:latest",
        "system": "Rhyme.",
        "parameters": {"temperature": 0.5, "stop": "x", "num_ctx": 512, "num_gpu": 1},
        "messages": [{"role": "user", "content": "a"}],
        "license": ["MIT", "more"],
    }
    assert lines(call("POST", "/api/create", body)) == [{"status": "success"}]
    recipe = ModelRecipe(
        name="poet",
        base=CARD.id,
        system="Rhyme.",
        license="MIT\n\nmore",
        parameters={"temperature": 0.5, "stop": ["x"], "num_ctx": 512},
        messages=(("user", "a"),),
    )
    assert generate.library.calls == [("create", recipe)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "neither 'from' or 'files' was specified"),
        ({"files": {"../x": "sha256:1"}}, "file path must be relative"),
        ({"files": {"/x": "sha256:1"}}, "file path must be relative"),
        ({"from": CARD.id, "quantize": "q4_K_M"}, "quantize does not support"),
        ({"from": CARD.id, "template": "{{ .Prompt }}"}, "template"),
        ({"from": CARD.id, "parameters": {"temperature": "hot"}}, "must be a number"),
        ({"from": CARD.id, "parameters": {"colour": 1}}, "unknown parameter"),
        ({"from": CARD.id, "messages": [{"role": "tool", "content": ""}]}, "role"),
    ],
)
def test_an_invalid_create_request_is_refused(
    generate: FakeGenerate, call, fields: Any, message: str
):
    reply = call("POST", "/api/create", {"model": "poet", **fields})
    assert reply.status == 400
    assert message in reply.json["error"]
    assert not generate.library.calls


def test_models_are_copied_and_deleted(generate: FakeGenerate, call):
    copied = call("POST", "/api/copy", {"source": "fake/model:latest", "destination": "b:v1"})
    assert (copied.status, copied.body) == (200, b"")
    deleted = call("DELETE", "/api/delete", {"name": CARD.id})
    assert (deleted.status, deleted.body) == (200, b"")
    # loaded, so it is unloaded first
    assert generate.unloaded == [CARD.id]
    assert generate.library.calls == [("copy", CARD.id, "b:v1"), ("delete", CARD.id)]
    refused = call("POST", "/api/copy", {"source": "no", "destination": "b"})
    assert (refused.status, refused.json) == (404, {"error": "model 'no' not found"})


def test_a_blob_is_written_as_it_arrives(generate: FakeGenerate, call):
    """Ten times what a request body may have."""
    digest = f"sha256:{'a' * 64}"
    assert call("HEAD", f"/api/blobs/{digest}").status == 404
    content = b"x" * 100_000
    assert call("POST", f"/api/blobs/{digest}", content, max_body=10_000).status == 201
    assert generate.library.blobs == {digest: content}
    assert call("POST", f"/api/blobs/{digest}", b"").status == 200
    assert call("HEAD", f"/api/blobs/{digest}").status == 200


def test_an_incomplete_blob_is_not_stored(generate: FakeGenerate):
    async def run() -> Reply:
        app = build_fake_app(generate, Settings())
        exchange = Conversation(app, "POST", f"/api/blobs/sha256:{'a' * 64}", None)
        exchange.incoming.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
        exchange.disconnect()
        return await exchange.end()

    asyncio.run(run())
    assert not generate.library.blobs


def test_a_push_is_not_supported(call):
    assert call("POST", "/api/push", {"model": "x"}).status == 501
