"""What the server reports about itself: /v1/status, /v1/engine/events, /v1/usage and /health.

Knows: the states of models and runners, Ollama's status codes, the counters of usage and load. Must
not know: how states and statistics are measured, how usage is limited.

All endpoints respond immediately with the last known values, even while a model is loading or an
engine is busy. Use /v1/status as a liveness probe: a 200 means that the HTTP process is running and
does not need a restart. Use /health as a readiness probe: a 200 means that new requests can be
served, and a 503 response contains the reason why they cannot. Neither of the two requires a key.

/v1/engine/events sends what /v1/status returns to the same caller once per second. A caller with an
admin key also receives a snapshot of the prefix cache of each loaded model whenever it has changed.
The engines take snapshots only while such a stream is open. The stream requires a key, because it
holds a connection open.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.core.errors import AppError, ErrorKind
from app.core.jobs import PREFIX_HIT_BUCKETS, EngineStats, PrefixNode, PrefixSnapshot
from app.core.models import ModelState
from app.core.ports import Models, RunnerState, RunnerStatus
from app.core.settings import LiveSettings
from app.core.thread_pools import ThreadPools
from app.core.usage import ConnectionStats, EventLoopLag, UsageCounters
from app.http.auth import get_caller, is_admin
from app.http.body import RequestBodies
from app.http.responses import JsonObject, error_response, json_response
from app.http.streaming import (
    KeepAlive,
    cancel_on_disconnect,
    encode_sse_event,
    send_event_stream,
)

# The number of seconds between two events.
_INTERVAL = 1.0

# The maximum number of open streams per caller. One page needs one.
MAX_STREAMS_PER_CALLER = 8

# The states of Ollama's llm.ServerStatus that apply to this server. 4 is "not responding", which
# matches a stalled engine: loaded and alive, but without progress.
OLLAMA_STATUS_CODES: Mapping[RunnerState, int] = {
    "ready": 0,
    "loading": 3,
    "stalled": 4,
    "failed": 5,
}


@dataclass(frozen=True, slots=True)
class FrontendStats:
    """The load statistics of one server."""

    bodies: RequestBodies
    workers: ThreadPools
    lag: EventLoopLag

    def render(self) -> JsonObject:
        """Returns the JSON object. LoopLag and LoopLagWorst are the current lag and the maximum lag
        in the last minute, in seconds. BodyBytes is the number of bytes that count against the
        memory budget."""
        return {
            "LoopLag": round(self.lag.latest, 4),
            "LoopLagWorst": round(self.lag.worst, 4),
            "Bodies": self.bodies.in_flight,
            "BodyBytes": self.bodies.reserved_bytes,
            "BodiesParsing": self.bodies.decoding,
            "WorkRunning": self.workers.running,
            "WorkQueued": self.workers.queued,
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


def engine_event_routes(
    models: Models, live: LiveSettings, frontend: FrontendStats, traffic: ConnectionStats
) -> list[Route]:
    """traffic: its `shutting_down` ends the streams, so that they do not delay a shutdown."""
    endpoint = EngineEvents(models, live, frontend, traffic)
    return [Route("/v1/engine/events", endpoint, methods=["GET"])]


class EngineEvents:
    """An ASGI application that streams the state of the server."""

    def __init__(
        self,
        models: Models,
        live: LiveSettings,
        frontend: FrontendStats,
        traffic: ConnectionStats,
    ) -> None:
        self._models = models
        self._live = live
        self._frontend = frontend
        self._traffic = traffic
        self._open_streams: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._count_stream(get_caller(scope)):

            async def exchange(send: Send) -> None:
                async with aclosing(self._iter_events(admin=is_admin(scope))) as events:
                    await send_event_stream(events, send, KeepAlive(self._live.current.ping))

            await cancel_on_disconnect(receive, send, exchange)

    @contextmanager
    def _count_stream(self, caller: str) -> Generator[None]:
        if self._open_streams[caller] >= MAX_STREAMS_PER_CALLER:
            raise AppError(
                ErrorKind.BUSY,
                f"{MAX_STREAMS_PER_CALLER} streams of engine events are open: close one of them",
                retry_after=1,
            )
        self._open_streams[caller] += 1
        try:
            yield
        finally:
            self._open_streams[caller] -= 1
            if not self._open_streams[caller]:
                del self._open_streams[caller]

    async def _iter_events(self, *, admin: bool) -> AsyncGenerator[bytes, None]:
        sent: dict[str, PrefixSnapshot] = {}
        while True:
            status = render_status(self._models, self._live, self._frontend, admin=admin)
            yield encode_sse_event({"Time": round(time.time(), 3), **status}, "status")
            for name in self._list_loaded() if admin else ():
                snapshot = self._models.get_prefix_snapshot(name)
                if snapshot is not None and snapshot != sent.get(name):
                    sent[name] = snapshot
                    yield encode_sse_event(render_snapshot(name, snapshot), "prefix")
            if self._traffic.shutting_down:
                return
            await asyncio.sleep(_INTERVAL)

    def _list_loaded(self) -> list[str]:
        return [state.name for state in self._models.list_model_states() if state.phase == "ready"]


def render_snapshot(model: str, snapshot: PrefixSnapshot) -> JsonObject:
    return {
        "Model": model,
        "Total": snapshot.total_nodes,
        "Nodes": [_render_node(node) for node in snapshot.nodes],
    }


def _render_node(node: PrefixNode) -> JsonObject:
    return {
        "Parent": node.parent,
        "Start": node.start,
        "Tokens": node.tokens,
        "LastUsed": round(node.last_used, 3),
        "Branches": node.branches,
        "Running": node.running,
    }


def usage_routes(usage: UsageCounters) -> list[Route]:
    async def show(request: Request) -> Response:
        """A caller sees its own usage, and an admin that of all callers."""
        own = get_caller(request.scope)
        names = sorted({own, *usage.snapshot()}) if is_admin(request.scope) else [own]
        data = [_render_caller(usage, name) for name in names]
        return json_response({"object": "list", "data": data})

    return [Route("/v1/usage", show, methods=["GET"])]


def _render_caller(usage: UsageCounters, name: str) -> JsonObject:
    used, limits = usage.get(name), usage.get_limits(name)
    return {
        "object": "usage",
        "key": name or None,
        "requests": used.requests,
        "prompt_tokens": used.prompt_tokens,
        "cached_tokens": used.cached_tokens,
        "generated_tokens": used.generated_tokens,
        "today": {"date": used.date, "tokens": used.today_tokens},
        "limits": {
            "daily_tokens": limits.daily_tokens,
            "requests_per_minute": limits.requests_per_minute,
        },
    }
