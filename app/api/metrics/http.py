"""Prometheus collectors for the HTTP layer: connections and responses, request bodies, work on
threads and event loop lag.

Knows: prometheus_client. Must not know: the counting of connections, responses and work.
"""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.api.front_end import FrontendStats
from app.core.server_stats import LAG_BUCKETS, ConnectionStats


class HttpCollector(Collector):
    """Exports the connection counters of one server."""

    def __init__(self, traffic: ConnectionStats) -> None:
        self._traffic = traffic

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics. This may run on any thread while the event loop writes, so it reads
        copies."""
        traffic = self._traffic
        yield GaugeMetricFamily(
            "mlxrunner_http_connections", "Open connections", value=traffic.open_connections
        )
        yield CounterMetricFamily(
            "mlxrunner_http_connections_opened",
            "Connections opened since the start",
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


class FrontendCollector(Collector):
    """Exports the load statistics of one server."""

    def __init__(self, stats: FrontendStats) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics. This may run on any thread while the event loop writes."""
        bodies, workers = self._stats.bodies, self._stats.workers
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
                bodies.parsing,
            ),
            (
                "mlxrunner_work_running",
                "Busy worker threads (prompts and responses)",
                workers.running,
            ),
            ("mlxrunner_work_queued", "Work items waiting for a worker thread", workers.queued),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        yield self._loop_lag_histogram()

    def _loop_lag_histogram(self) -> Metric:
        lag = self._stats.lag
        bounds = [*map(str, LAG_BUCKETS), "+Inf"]
        counts = accumulate(list(lag.bucket_counts))
        return HistogramMetricFamily(
            "mlxrunner_event_loop_lag_seconds",
            "Event loop lag, measured 20 times a second",
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=lag.sum_seconds,
        )
