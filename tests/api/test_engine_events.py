"""GET /v1/engine/events: which data each caller sees, when snapshots are taken, and the end of a
stream."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette

from app.api.status import MAX_STREAMS_PER_CALLER
from app.core.jobs import PrefixNode, PrefixSnapshot
from app.core.settings import Settings
from app.core.usage import ConnectionStats
from app.http.api_keys import ApiKey, Keyring, generate_key, hash_key
from tests.api.asgi import Conversation, Reply, pending_tasks
from tests.fakes import READY, FakeGenerate, build_fake_app

EVENTS = "/v1/engine/events"
USER, ADMIN = generate_key(), generate_key()
KEYS = Keyring(
    (
        ApiKey(name="laptop", digest=hash_key(USER)),
        ApiKey(name="boss", digest=hash_key(ADMIN), admin=True),
    )
)
SNAPSHOT = PrefixSnapshot(
    nodes=(
        PrefixNode(parent=None, start=0, tokens=40, last_used=1.7e9, branches=2, running=1),
        PrefixNode(parent=0, start=40, tokens=50, last_used=1.6e9),
    ),
    total_nodes=3,
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def parse(body: bytes) -> list[tuple[str, Any]]:
    """The events of a body: name and data."""
    found: list[tuple[str, Any]] = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def count_status(events: Sequence[tuple[str, Any]]) -> int:
    return sum(name == "status" for name, _ in events)


def watch(
    app: Starlette,
    until: Callable[[Reply], bool],
    headers: dict[str, str] | None = None,
) -> Reply:
    """Returns the reply until it meets a condition; then the client disconnects."""

    async def run() -> Reply:
        conversation = Conversation(app, "GET", EVENTS, b"", headers)
        await conversation.until(until)
        conversation.disconnect()
        reply = await conversation.end()
        assert not pending_tasks()
        return reply

    return asyncio.run(run())


def two_events(reply: Reply) -> bool:
    return reply.body.count(b"event: status") >= 2


@pytest.fixture
def generate() -> FakeGenerate:
    return FakeGenerate(prefix_snapshot=SNAPSHOT)


def build(generate: FakeGenerate, **options: Any) -> Starlette:
    return build_fake_app(generate, Settings(), traffic=ConnectionStats(), **options)


def test_the_events_have_the_content_of_the_status(generate: FakeGenerate, call: Any):
    [(_, first), *rest] = parse(watch(build(generate), two_events).body)
    status = call("GET", "/v1/status").json
    assert {**first, "FrontEnd": None, "Time": None} == {**status, "FrontEnd": None, "Time": None}
    later = [data["Time"] for name, data in rest if name == "status"]
    assert later[0] > first["Time"]


def test_a_snapshot_is_sent_once_until_it_changes(generate: FakeGenerate):
    events = parse(watch(build(generate), two_events).body)
    [prefix] = [data for name, data in events if name == "prefix"]
    keys = ("Parent", "Start", "Tokens", "LastUsed", "Branches", "Running")
    rows = [(None, 0, 40, 1.7e9, 2, 1), (0, 40, 50, 1.6e9, 0, 0)]
    nodes = [dict(zip(keys, row, strict=True)) for row in rows]
    assert prefix == {"Model": "fake/model", "Total": 3, "Nodes": nodes}

    def change(reply: Reply) -> bool:
        if two_events(reply):
            generate.prefix_snapshot = replace(SNAPSHOT, total_nodes=4)
        return reply.body.count(b"event: prefix") == 2

    changed = parse(watch(build(generate), change).body)
    assert [data["Total"] for name, data in changed if name == "prefix"] == [3, 4]


def test_a_model_that_is_not_loaded_is_not_asked(generate: FakeGenerate):
    generate.runner_status = replace(READY, state="loading", progress=40)
    events = parse(watch(build(generate), two_events).body)
    assert count_status(events) == len(events)
    assert generate.snapshots_requested == []


def test_without_an_admin_key_only_the_public_fields_are_sent(generate: FakeGenerate):
    app = build(generate, keyring=KEYS)
    events = parse(watch(app, two_events, bearer(USER)).body)
    public = {"Time", "Status", "Progress", "ContextLength", "Memory"}
    assert {key for _, data in events for key in data} == public
    assert generate.snapshots_requested == []
    assert b"Ledger" in watch(app, two_events, bearer(ADMIN)).body


def test_without_a_key_there_is_no_stream(generate: FakeGenerate):
    app = build(generate, keyring=KEYS)
    assert watch(app, lambda reply: reply.complete).status == 401


def test_a_shutdown_ends_the_stream(generate: FakeGenerate):
    traffic = ConnectionStats()

    async def run() -> Reply:
        app = build_fake_app(generate, Settings(), traffic=traffic)
        conversation = Conversation(app, "GET", EVENTS)
        await conversation.until(lambda reply: b"event: status" in reply.body)
        traffic.shutting_down = True
        return await conversation.end()

    assert asyncio.run(run()).complete


def test_a_caller_may_open_only_a_few_streams(generate: FakeGenerate):
    async def run() -> None:
        app = build(generate, keyring=KEYS)
        streams = [
            Conversation(app, "GET", EVENTS, b"", bearer(USER))
            for _ in range(MAX_STREAMS_PER_CALLER)
        ]
        for stream in streams:
            await stream.until(lambda reply: b"event: status" in reply.body)
        refused = await Conversation(app, "GET", EVENTS, b"", bearer(USER)).end()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "8 streams" in refused.error["message"]
        other = Conversation(app, "GET", EVENTS, b"", bearer(ADMIN))
        await other.until(lambda reply: b"event: status" in reply.body)
        for stream in (*streams, other):
            stream.disconnect()
            await stream.end()
        again = Conversation(app, "GET", EVENTS, b"", bearer(USER))
        await again.until(lambda reply: reply.status == 200)
        again.disconnect()
        await again.end()

    asyncio.run(run())
