"""The Prometheus endpoint: /metrics.

Knows: prometheus_client, starlette. Must not know: the counting of the values below.

Each value has one writer. Engine values are read from the models' states at each scrape. Values of
a request's lifecycle are recorded by a request observer. Values of connections are recorded by the
HTTP layer.
"""

import asyncio

from prometheus_client import CollectorRegistry, Info, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.front_end import FrontendStats
from app.api.metrics.engines import EngineCollector
from app.api.metrics.http import FrontendCollector, HttpCollector
from app.api.metrics.request_metrics import RequestMetrics
from app.core.distributions import get_own_version
from app.core.observers import ObserverFactory
from app.core.ports import Models
from app.core.server_stats import ConnectionStats


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self, models: Models, traffic: ConnectionStats, frontend: FrontendStats) -> None:
        self._registry = CollectorRegistry()
        self._models = models
        self._engine_collector = EngineCollector()
        self._registry.register(self._engine_collector)
        self._request_metrics = RequestMetrics(self._registry)
        self.observe: ObserverFactory = self._request_metrics.observe
        self._registry.register(HttpCollector(traffic))
        self._registry.register(FrontendCollector(frontend))
        # covers only the HTTP process, because runners are separate processes; Linux only
        ProcessCollector(registry=self._registry)
        Info("mlxrunner_build", "Version of the server", registry=self._registry).info(
            {"version": get_own_version()}
        )

    def routes(self) -> list[Route]:
        async def metrics(request: Request) -> Response:
            for state in self._engine_collector.refresh(self._models):
                if state.phase != "unloaded":
                    self._request_metrics.for_model(
                        state.name
                    )  # so that the model's counters start at zero rather than one
            # this takes five milliseconds per model, which must not delay other responses
            text = await asyncio.to_thread(generate_latest, self._registry)
            return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

        return [Route("/metrics", metrics, methods=["GET"])]
