"""What comes to the door, as Prometheus reads it.

Knows: prometheus_client, the names of prometheus-fastapi-instrumentator, by which vLLM's servers
count their answers (`http_requests_total`). Must not know: how anything is counted.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.core.traffic import ConnectionStats


class HttpCollector(Collector):
    """Those of one server."""

    def __init__(self, traffic: ConnectionStats) -> None:
        self._traffic = traffic

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """On any thread, beside the event loop, which writes: so copies are read."""
        traffic = self._traffic
        yield GaugeMetricFamily(
            "mlxrunner_http_connections", "Open connections", value=traffic.open_connections
        )
        yield CounterMetricFamily(
            "mlxrunner_http_connections_opened",
            "Connections opened since the start",
            traffic.accepted_connections,
        )
        turned_away = CounterMetricFamily(
            "mlxrunner_http_connections_turned_away",
            "Connections closed by the server before the request was complete or the response was "
            "read, by reason",
            labels=["reason"],
        )
        for reason, count in traffic.closed_by_reason.copy().items():
            turned_away.add_metric([reason], count)
        yield turned_away
        answered = CounterMetricFamily(
            "http_requests",
            "Responses by route (none: rejected before routing), method and status class; 4xx if "
            "the client disconnected",
            labels=["handler", "method", "status"],
        )
        for (method, route, status), count in traffic.responses.copy().items():
            answered.add_metric([route, method, status], count)
        yield answered
