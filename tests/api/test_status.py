"""/v1/status and /health in every state."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from app.api.status import health_routes, hit_bucket_labels
from app.core.jobs import ComputeBackend, EngineStats
from app.core.models import ModelState
from app.core.ports import RunnerStatus
from app.core.settings import LiveSettings, Settings
from tests.api.asgi import Conversation
from tests.fakes import CAPACITY, CARD, STATS, FakeGenerate, make_front_end

LOADING = RunnerStatus(state="loading", progress=40, stats=EngineStats(allocated_bytes=5))
FAILED = RunnerStatus(state="failed", progress=40, stats=EngineStats(), error="no such tensor")
STALLED = RunnerStatus(
    state="stalled",
    progress=100,
    stats=STATS,
    error="the engine has made no progress for 75 s (decode, batch size 8)",
    capacity=CAPACITY,
)


def test_the_status_of_a_ready_server(call: Any):
    assert call("GET", "/v1/status", max_queue=7).json == {
        "Status": 0,
        "Progress": 100,
        "ContextLength": 4096,
        "Memory": 123_456,
        "Error": None,
        "Parallel": 2,
        "Running": 2,
        "Waiting": 3,
        "Preparing": 0,
        "Compiling": 0,
        "MaxQueue": 7,
        "Rejected": 9,
        "Ledger": {
            "budget": 1000,
            "weights": 400,
            "kv": 250,
            "prefix": 100,
            "working": 50,
            "free": 200,
        },
        "PrefixLimit": 300,
        "Wired": 700,
        "Tokens": {"cached": 700, "prefilled": 90, "generated": 55},
        "Hits": {
            "0": 4,
            "1-16": 0,
            "17-64": 1,
            "65-256": 0,
            "257-1024": 2,
            "1025-4096": 0,
            "4097-16384": 0,
            "16385-65536": 0,
            "65537+": 1,
        },
        "Misses": {"empty": 4, "diverged": 3},
        "Evictions": 6,
        "Preemptions": 5,
        "Failures": 1,
        "Steps": 321,
        "FrontEnd": {
            "LoopLag": 0.0,
            "LoopLagWorst": 0.0,
            "Bodies": 0,
            "BodyBytes": 0,
            "BodiesParsing": 0,
            "WorkRunning": 0,
            "WorkQueued": 0,
        },
        "Models": [
            {
                "Name": CARD.id,
                "Phase": "ready",
                "Progress": 100,
                "Leases": 0,
                "Running": 2,
                "Waiting": 3,
                "Preparing": 0,
                "Compiling": 0,
                "Rejected": 9,
                "Memory": 123_456,
                "Share": None,
                "ContextLength": 4096,
                "Parallel": 2,
                "Pinned": False,
                "Expires": None,
                "Loads": 0,
                "Evictions": 0,
                "Restarts": 0,
                "Error": None,
                "Pid": None,
                "Backend": None,
                "KV": None,
            }
        ],
    }
    assert call("GET", "/health").json == {"status": "ok"}


def test_requests_being_prepared_count_as_waiting(call: Any, generate: FakeGenerate):
    """Twenty clients waited for a schema, and `Waiting` reported 0."""
    generate.runner_status = replace(generate.runner_status, preparing=2, compiling=20)
    status = call("GET", "/v1/status").json
    assert (status["Waiting"], status["Preparing"], status["Compiling"]) == (25, 2, 20)
    [model] = status["Models"]
    assert (model["Waiting"], model["Preparing"], model["Compiling"]) == (25, 2, 20)


def test_each_model_has_its_state(
    call: Any, generate: FakeGenerate, monkeypatch: pytest.MonkeyPatch
):
    broken = ModelState(name="a", phase="refused", restarts=3, error="killed by SIGKILL")
    loaded = ModelState(
        name="b", phase="ready", leases=1, allocation=5, expires_at=1.5, pid=7, pinned=True
    )
    monkeypatch.setattr(generate, "list_model_states", lambda: [broken, loaded])
    one, two = call("GET", "/v1/status").json["Models"]
    assert [one[key] for key in ("Name", "Phase", "Restarts", "Error", "Pid")] == [
        *("a", "refused", 3, "killed by SIGKILL", None)
    ]
    keys = ("Leases", "Share", "Expires", "Pid", "Pinned")
    assert [two[key] for key in keys] == [1, 5, 1.5, 7, True]


def test_a_loaded_model_reports_its_backend(
    call: Any, generate: FakeGenerate, monkeypatch: pytest.MonkeyPatch
):
    backend = ComputeBackend(
        device="cpu", kernels="avx512", blas="OpenBLAS 0.3", threads=2, activations=16
    )
    loaded = ModelState(name="a", phase="ready", backend=backend, kv_dtype="bfloat16")
    monkeypatch.setattr(generate, "list_model_states", lambda: [loaded])
    [one] = call("GET", "/v1/status").json["Models"]
    assert one["Backend"] == {
        "device": "cpu",
        "kernels": "avx512",
        "blas": "OpenBLAS 0.3",
        "threads": 2,
        "activations": 16,
    }
    assert one["KV"] == "bfloat16"


def test_without_an_admin_key_the_status_has_only_ollamas_fields(generate: FakeGenerate):
    """`app.http.auth.AuthMiddleware` sets `admin` to False without a key or with an ordinary
    one."""
    [route] = [
        route
        for route in health_routes(generate, LiveSettings(Settings()), make_front_end())
        if route.path == "/v1/status"
    ]

    async def run(state: dict[str, Any]) -> Any:
        async def app_with_state(scope: Any, receive: Any, send: Any) -> None:
            await route.app({**scope, "state": state}, receive, send)

        return (await Conversation(app_with_state, "GET", "/v1/status").end()).json

    ollama_fields = {"Status": 0, "Progress": 100, "ContextLength": 4096, "Memory": 123_456}
    assert asyncio.run(run({"admin": False})) == ollama_fields
    assert asyncio.run(run({"admin": True})).items() > ollama_fields.items()


def test_every_hit_bucket_has_its_own_label():
    assert len(set(hit_bucket_labels())) == len(EngineStats().prefix_hit_counts)


def get_ollama_fields(status: Any) -> list[int]:
    return [status[key] for key in ("Status", "Progress", "ContextLength", "Memory")]


def test_a_loading_server_reports_its_progress(call: Any, generate: FakeGenerate):
    generate.runner_status, generate.cards = LOADING, ()
    reply = call("GET", "/v1/status")
    assert reply.status == 200
    assert get_ollama_fields(reply.json) == [3, 40, 0, 5]
    assert (reply.json["Parallel"], reply.json["Error"]) == (0, None)
    health = call("GET", "/health")
    assert health.status == 503
    assert health.headers["retry-after"] == "1"
    assert "40 %" in health.error["message"]


def test_a_failed_server_reports_its_error(call: Any, generate: FakeGenerate):
    generate.runner_status = FAILED
    reply = call("GET", "/v1/status")
    assert (reply.status, reply.json["Status"]) == (200, 5)
    assert reply.json["Error"] == "no such tensor"
    health = call("GET", "/health")
    assert health.status == 503
    assert "retry-after" not in health.headers
    assert health.error["message"] == "no such tensor"


def test_a_stalled_server_reports_its_error(call: Any, generate: FakeGenerate):
    """The model is loaded, but the server must not get requests."""
    generate.runner_status = STALLED
    reply = call("GET", "/v1/status")
    assert reply.status == 200
    assert get_ollama_fields(reply.json) == [4, 100, 4096, 123_456]
    assert reply.json["Error"] == STALLED.error
    health = call("GET", "/health")
    assert health.status == 503
    assert health.error["message"] == STALLED.error


@pytest.mark.parametrize("path", ["/v1/status", "/health", "/metrics", "/v1/models"])
def test_head_requests_are_answered(call: Any, path: str):
    assert call("HEAD", path).status == 200
