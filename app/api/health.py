"""Health endpoints: /v1/status reports state and memory, /health reports readiness.

Knows: the states of models and runners, Ollama's status codes. Must not know: how states and
statistics are measured.

Both endpoints respond immediately with the last known values, even while a model is loading or an
engine is busy. Use /v1/status as a liveness probe: a 200 means that the HTTP process is running and
does not need a restart. Use /health as a readiness probe: a 200 means that new requests can be
served, and a 503 response contains the reason why they cannot. Neither endpoint requires a key.
"""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.front_end import FrontendStats
from app.core.errors import AppError, ErrorKind
from app.core.jobs import PREFIX_HIT_BUCKETS, EngineStats
from app.core.models import ModelState
from app.core.ports import Models, RunnerState, RunnerStatus
from app.core.settings import LiveSettings
from app.http.auth import is_admin
from app.http.errors import error_response
from app.http.responses import JsonObject, json_response

# The states of Ollama's llm.ServerStatus that apply to this server. 4 is "not responding", which
# matches a stalled engine: loaded and alive, but without progress.
OLLAMA_STATUS_CODES: Mapping[RunnerState, int] = {
    "ready": 0,
    "loading": 3,
    "stalled": 4,
    "failed": 5,
}


def health_routes(models: Models, live: LiveSettings, frontend: FrontendStats) -> list[Route]:
    async def status(request: Request) -> Response:
        admin = is_admin(request.scope)
        return json_response(render_status(models, live, frontend, admin=admin))

    async def health(request: Request) -> Response:
        now = models.status()
        if now.state == "ready":
            return json_response({"status": "ok"})
        if now.state == "loading":
            return error_response(
                AppError(ErrorKind.LOADING, f"the model is loading ({now.progress} %)")
            )
        # 503 for every error type, because a server without an engine is not ready
        return error_response(
            AppError(ErrorKind.ENGINE, now.error or "the engine failed"), status=503
        )

    return [
        Route("/v1/status", status, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/v1/health", health, methods=["GET"]),
    ]


def render_status(
    models: Models, live: LiveSettings, frontend: FrontendStats, *, admin: bool
) -> JsonObject:
    """Returns the body of /v1/status. admin: whether the caller may see more than its first four
    fields."""
    now = models.status()
    cards = models.list_models()
    body: JsonObject = {
        "Status": OLLAMA_STATUS_CODES[now.state],
        "Progress": now.progress if now.state in ("loading", "failed") else 100,
        "ContextLength": cards[0].context_length if cards else 0,
        "Memory": now.stats.allocated_bytes,
    }
    if admin:
        body |= {
            "Error": now.error,
            **_render_requests(now, live.current.max_queue),
            **_render_engine(now.stats),
        }
        body["FrontEnd"] = frontend.render()
        body["Models"] = [_render_model(state) for state in models.list_model_states()]
    return body


def _render_requests(now: RunnerStatus, max_queue: int) -> JsonObject:
    """Renders the request counts. Ollama's client reads only the four fields before these."""
    return {
        "Parallel": 0 if now.capacity is None else now.capacity.parallel,
        "Running": now.stats.running,
        "Waiting": now.stats.waiting + now.preparing + now.compiling,
        "Preparing": now.preparing,
        "Compiling": now.compiling,
        "MaxQueue": max_queue,
        "Rejected": now.rejected,
    }


def _render_engine(stats: EngineStats) -> JsonObject:
    ledger = stats.ledger
    return {
        "Ledger": {
            "budget": ledger.budget,
            "weights": ledger.weights,
            "kv": ledger.kv,
            "prefix": ledger.prefix,
            "working": ledger.working,
            "free": ledger.free,
        },
        "PrefixLimit": ledger.prefix_limit,
        "Wired": ledger.wired,
        "Tokens": {
            "cached": stats.cached_tokens,
            "prefilled": stats.prefilled_tokens,
            "generated": stats.generated_tokens,
        },
        "Hits": dict(zip(hit_bucket_labels(), stats.prefix_hit_counts, strict=True)),
        "Misses": dict(stats.prefix_miss_counts),
        "Evictions": stats.prefix_evictions,
        "Preemptions": stats.preemptions,
        "Failures": stats.failures,
        "Steps": stats.steps,
    }


def _render_model(state: ModelState) -> JsonObject:
    """Renders one entry of the model list."""
    return {
        "Name": state.name,
        "Phase": state.phase,
        "Progress": state.progress,
        "Leases": state.leases,
        "Running": state.stats.running,
        "Waiting": state.stats.waiting + state.preparing + state.compiling,
        "Preparing": state.preparing,
        "Compiling": state.compiling,
        "Rejected": state.rejected,
        "Memory": state.stats.allocated_bytes,
        "Share": state.allocation,
        "ContextLength": state.context_length,
        "Parallel": state.parallel,
        "Pinned": state.pinned,
        "Expires": state.expires_at,
        "Loads": state.loads,
        "Evictions": state.evictions,
        "Restarts": state.restarts,
        "Error": state.error,
        "Pid": state.pid,
        "Backend": None if state.backend is None else asdict(state.backend),
        "KV": state.kv_dtype,
    }


def hit_bucket_labels() -> list[str]:
    """Returns the labels of the buckets in `EngineStats.prefix_hit_counts`: "0", "1-16", …,
    "65537+"."""
    between = [f"{low + 1}-{high}" for low, high in pairwise(PREFIX_HIT_BUCKETS)]
    return [str(PREFIX_HIT_BUCKETS[0]), *between, f"{PREFIX_HIT_BUCKETS[-1] + 1}+"]
