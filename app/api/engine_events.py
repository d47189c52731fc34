"""The live state of the server as a stream: GET /v1/engine/events.

Knows: the events `status` and `prefix`, the interval between them. Must not know: the measurement
of the state, the engine.

The stream sends what /v1/status returns to the same caller once per second. A caller with an admin
key also receives a snapshot of the prefix cache of each loaded model whenever it has changed. The
engines take snapshots only while such a stream is open. Unlike /v1/status, the stream requires a
key, because it holds a connection open.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.api.front_end import FrontendStats
from app.api.health import render_status
from app.core.errors import AppError, ErrorKind
from app.core.jobs import PrefixNode, PrefixSnapshot
from app.core.ports import Models
from app.core.settings import LiveSettings
from app.core.usage import ConnectionStats
from app.http.auth import get_caller, is_admin
from app.http.responses import JsonObject
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
