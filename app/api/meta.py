"""How the server is: /v1/status for programs that wait for a model and for people who wonder where
their memory is, /health for whoever watches.

Both answer at once, from what is known, also while a model is loading or the engine is busy.
"""

from collections.abc import Mapping
from itertools import pairwise

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.wire import JsonObject, json_reply, problem_reply
from app.core.errors import AppError, Kind
from app.core.jobs import HIT_BOUNDS, EngineStats
from app.core.ports import Generate, RunnerState, RunnerStatus
from app.core.settings import Settings

# Of the numbers that Ollama's llm.ServerStatus gives to states, those which we can be in. The
# fourth is its "not responding", which is what a stalled engine is: loaded, alive, and no answer.
STATUS: Mapping[RunnerState, int] = {"ready": 0, "loading": 3, "stalled": 4, "failed": 5}


def routes(generate: Generate, settings: Settings) -> list[Route]:
    async def status(request: Request) -> Response:
        now = generate.status()
        cards = generate.models()
        return json_reply(
            {
                "Status": STATUS[now.state],
                "Progress": now.progress if now.state in ("loading", "failed") else 100,
                "ContextLength": cards[0].context_length if cards else 0,
                "Memory": now.stats.memory,
                "Error": now.error,
                **_requests(now, settings.max_queue),
                **_engine(now.stats),
            }
        )

    async def health(request: Request) -> Response:
        now = generate.status()
        if now.state == "ready":
            return json_reply({"status": "ok"})
        if now.state == "loading":
            return problem_reply(
                AppError(Kind.LOADING, f"the model is loading: {now.progress} % so far")
            )
        # 503 whatever the kind: to those who ask, a server without an engine is an absent one.
        return problem_reply(AppError(Kind.ENGINE, now.error or "the engine failed"), status=503)

    return [
        Route("/v1/status", status, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]


def _requests(now: RunnerStatus, max_queue: int) -> JsonObject:
    """Ollama's client reads the four fields before these, and no others."""
    return {
        "Parallel": 0 if now.capacity is None else now.capacity.parallel,
        "Running": now.stats.running,
        "Waiting": now.stats.waiting,
        "MaxQueue": max_queue,
        "Rejected": now.rejected,
    }


def _engine(stats: EngineStats) -> JsonObject:
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
        "Tokens": {
            "cached": stats.cached_tokens,
            "prefilled": stats.prefilled_tokens,
            "generated": stats.generated_tokens,
        },
        "Hits": dict(zip(hit_classes(), stats.hits, strict=True)),
        "Misses": dict(stats.misses),
        "Evictions": stats.evictions,
        "Preemptions": stats.preemptions,
        "Failures": stats.failures,
        "Steps": stats.steps,
    }


def hit_classes() -> list[str]:
    """Names of the classes that `EngineStats.hits` counts: "0", "1-16", …, "65537+"."""
    between = [f"{low + 1}-{high}" for low, high in pairwise(HIT_BOUNDS)]
    return [str(HIT_BOUNDS[0]), *between, f"{HIT_BOUNDS[-1] + 1}+"]
