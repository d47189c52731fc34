"""The Prometheus endpoint: /metrics.

Knows: prometheus_client, starlette. Must not know: the counting of the values below.

Each value has one writer. Engine values are read from the models' states at each scrape. Values of
a request's lifecycle are recorded by a request observer. Values of connections are recorded by the
HTTP layer.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.metrics.engines import EngineCollector
from app.api.metrics.llamacpp import LlamaCppMetrics
from app.api.metrics.request_metrics import RequestMetrics
from app.api.status import FrontendStats
from app.core.distributions import get_own_version
from app.core.ports import Models
from app.core.request_lifecycle import ObserverFactory
from app.core.usage import LAG_BUCKETS, ConnectionStats, UsageCounters


class _FunctionCollector(Collector):
    """Exports the metrics that a function yields. It may run on any thread while the event loop
    writes, so it reads copies."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        return self._collect()


def collect_connections(traffic: ConnectionStats) -> Iterator[Metric]:
    """Yields the connection counters of one server."""
    yield GaugeMetricFamily(
        "mlxrunner_http_connections", "Open connections", value=traffic.open_connections
    )
    yield CounterMetricFamily(
        "mlxrunner_http_connections_opened",
        "Connections opened since startup",
        traffic.accepted_connections,
    )
    rejected = CounterMetricFamily(
        "mlxrunner_http_connections_turned_away",
        "Connections that the server closed before the request was complete or the response "
        "was read, by reason",
        labels=["reason"],
    )
    for reason, count in traffic.closed_by_reason.copy().items():
        rejected.add_metric([reason], count)
    yield rejected
    responses = CounterMetricFamily(
        "http_requests",
        "Responses by route (none: rejected before routing), method and status class; 4xx if "
        "the client disconnected",
        labels=["handler", "method", "status"],
    )
    for (method, route, status), count in traffic.responses.copy().items():
        responses.add_metric([route, method, status], count)
    yield responses
    ignored = CounterMetricFamily(
        "mlxrunner_unknown_fields",
        "Unknown request fields that were ignored, by route",
        labels=["handler"],
    )
    for route, count in traffic.ignored_fields.copy().items():
        ignored.add_metric([route], count)
    yield ignored


def collect_load(stats: FrontendStats) -> Iterator[Metric]:
    """Yields the load statistics of one server."""
    bodies, workers = stats.bodies, stats.workers
    for name, text, value in (
        ("mlxrunner_http_bodies", "Request bodies in flight", bodies.in_flight),
        (
            "mlxrunner_http_body_bytes",
            "Memory of in-flight request bodies that counts against their budget",
            bodies.reserved_bytes,
        ),
        (
            "mlxrunner_http_bodies_parsing",
            "Large request bodies being parsed or waiting to be parsed",
            bodies.decoding,
        ),
        (
            "mlxrunner_work_running",
            "Busy worker threads (prompts and responses)",
            workers.running,
        ),
        ("mlxrunner_work_queued", "Work items waiting for a worker thread", workers.queued),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    lag = stats.lag
    bounds = [*map(str, LAG_BUCKETS), "+Inf"]
    counts = accumulate(list(lag.bucket_counts))
    yield HistogramMetricFamily(
        "mlxrunner_event_loop_lag_seconds",
        "Event loop lag, measured 20 times a second",
        buckets=list(zip(bounds, counts, strict=True)),
        sum_value=lag.sum_seconds,
    )


def collect_usage(counters: UsageCounters) -> Iterator[Metric]:
    """Yields the usage of each API key."""
    usage = counters.snapshot()
    for name, text, field in (
        ("mlxrunner_key_requests", "Accepted requests by API key", "requests"),
        (
            "mlxrunner_key_prompt_tokens",
            "Prompt tokens by API key, including cached ones",
            "prompt_tokens",
        ),
        (
            "mlxrunner_key_cached_tokens",
            "Prompt tokens by API key that were found in the prefix cache",
            "cached_tokens",
        ),
        ("mlxrunner_key_generated_tokens", "Generated tokens by API key", "generated_tokens"),
    ):
        metric = CounterMetricFamily(name, text, labels=["key"])
        for caller, used in usage.items():
            metric.add_metric([caller], getattr(used, field))
        yield metric


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(
        self,
        models: Models,
        traffic: ConnectionStats,
        frontend: FrontendStats,
        usage: UsageCounters,
    ) -> None:
        self._registry = CollectorRegistry()
        self._models = models
        self._engine_collector = EngineCollector()
        self._registry.register(self._engine_collector)
        self._request_metrics = RequestMetrics(self._registry)
        self._llamacpp = LlamaCppMetrics()
        # llama.cpp's header: dashboards compare it to find restarts
        self._start_header = {"Process-Start-Time-Unix": str(int(time.time()))}
        self.observe: ObserverFactory = self._request_metrics.observe
        for collect in (
            partial(collect_connections, traffic),
            partial(collect_load, frontend),
            partial(collect_usage, usage),
        ):
            self._registry.register(_FunctionCollector(collect))
        # covers only the HTTP process, because runners are separate processes; Linux only
        ProcessCollector(registry=self._registry)
        Info("mlxrunner_build", "Version of the server", registry=self._registry).info(
            {"version": get_own_version()}
        )

    def routes(self) -> list[Route]:
        async def metrics(request: Request) -> Response:
            states = self._engine_collector.refresh(self._models)
            for state in states:
                if state.phase != "unloaded":
                    # so that the model's counters start at zero rather than one
                    self._request_metrics.for_model(state.name)
            # this takes five milliseconds per model, which must not delay other responses
            text = await asyncio.to_thread(generate_latest, self._registry)
            text += self._llamacpp.render(states, self._request_metrics.sum_times()).encode()
            headers = {"Content-Type": CONTENT_TYPE_PLAIN_0_0_4, **self._start_header}
            return Response(text, headers=headers)

        return [Route("/metrics", metrics, methods=["GET"])]
