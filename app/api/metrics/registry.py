"""/metrics: what Prometheus scrapes.

Knows: prometheus_client, starlette. Must not know: how any of it is counted below. Each number has
one writer: the engines' are read from the models' states when somebody scrapes, those of a
request's life are noted by a watcher of requests, and those of the door by the door.
"""

import asyncio
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Info, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.front_end import FrontendStats
from app.api.metrics.engines import EngineCollector
from app.api.metrics.http import FrontendCollector, HttpCollector
from app.api.metrics.request_observer import RequestMetrics
from app.core.embeddings import EmbedRequest
from app.core.observers import RequestObserver
from app.core.ports import Generate
from app.core.requests import GenerateRequest
from app.core.server_stats import ConnectionStats


class Metrics:
    """Figures of one server, in a registry of its own."""

    def __init__(
        self, generate: Generate, traffic: ConnectionStats, frontend: FrontendStats
    ) -> None:
        self._registry = CollectorRegistry()
        self._generate = generate
        self._engine_collector = EngineCollector()
        self._registry.register(self._engine_collector)
        self._request_metrics = RequestMetrics(self._registry, self._served_name)
        self._registry.register(HttpCollector(traffic))
        self._registry.register(FrontendCollector(frontend))
        # of the front door alone: runners are processes of their own. Linux only.
        ProcessCollector(registry=self._registry)
        Info("mlxrunner_build", "Version of the server", registry=self._registry).info(
            {"version": version("mlxrunner")}
        )

    def observe(self, request: GenerateRequest | EmbedRequest) -> RequestObserver:
        """To be told of every request (`app.core.observers.ObserverFactory`)."""
        return self._request_metrics.observe(request)

    def routes(self) -> list[Route]:
        async def metrics(request: Request) -> Response:
            for state in self._engine_collector.refresh(self._generate):
                if state.phase != "unloaded":
                    self._request_metrics.for_model(
                        state.name
                    )  # so that its figures begin at zero, not at one
            # five milliseconds for each model: those who are being answered must not wait for that
            text = await asyncio.to_thread(generate_latest, self._registry)
            return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

        return [Route("/metrics", metrics, methods=["GET"])]

    def _served_name(self, requested: str) -> str:
        """Ollama's clients write out the tag that a name without one stands for."""
        names = {state.name for state in self._generate.list_model_states()}
        for name in (requested, requested.removesuffix(":latest")):
            if name in names:
                return name
        return ""
