"""How the server is: /v1/status for programs that wait for a model, /health for whoever watches.

Both answer at once, from what is known, also while a model is loading or the engine is busy.
"""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.wire import json_reply, problem_reply
from app.core.errors import AppError, Kind
from app.core.ports import Generate, RunnerState

# Of the numbers that Ollama's llm.ServerStatus gives to states, those which we can be in.
STATUS: Mapping[RunnerState, int] = {"ready": 0, "loading": 3, "failed": 5}


def routes(generate: Generate) -> list[Route]:
    async def status(request: Request) -> Response:
        now = generate.status()
        cards = generate.models()
        return json_reply(
            {
                "Status": STATUS[now.state],
                "Progress": 100 if now.state == "ready" else now.progress,
                "ContextLength": cards[0].context_length if cards else 0,
                "Memory": now.stats.memory,
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
