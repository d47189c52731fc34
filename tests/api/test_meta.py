"""/v1/status and /health in every state."""

from typing import Any

import pytest

from app.core.jobs import EngineStats
from app.core.ports import RunnerStatus
from tests.fakes import FakeGenerate

LOADING = RunnerStatus(state="loading", progress=40, stats=EngineStats(memory=5))
FAILED = RunnerStatus(state="failed", progress=40, stats=EngineStats(), error="no such tensor")


def test_a_ready_server_says_so(call: Any):
    assert call("GET", "/v1/status").json == {
        "Status": 0,
        "Progress": 100,
        "ContextLength": 4096,
        "Memory": 123_456,
    }
    assert call("GET", "/health").json == {"status": "ok"}


def test_a_loading_server_tells_how_far_it_is(call: Any, generate: FakeGenerate):
    generate.now, generate.cards = LOADING, ()
    reply = call("GET", "/v1/status")
    assert reply.status == 200
    assert reply.json == {"Status": 3, "Progress": 40, "ContextLength": 0, "Memory": 5}
    health = call("GET", "/health")
    assert health.status == 503
    assert health.headers["retry-after"] == "1"
    assert "40 %" in health.error["message"]


def test_a_failed_server_tells_why(call: Any, generate: FakeGenerate):
    generate.now = FAILED
    reply = call("GET", "/v1/status")
    assert (reply.status, reply.json["Status"]) == (200, 5)
    health = call("GET", "/health")
    assert health.status == 503
    assert "retry-after" not in health.headers
    assert health.error["message"] == "no such tensor"


@pytest.mark.parametrize("path", ["/v1/status", "/health", "/v1/models"])
def test_head_is_answered(call: Any, path: str):
    assert call("HEAD", path).status == 200
