"""The metric families that are counted per request: names, labels, bucket bounds.

Knows: prometheus_client, vLLM's names and bounds (vllm/v1/metrics/loggers.py). Must not know:
requests, the time at which values are counted.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.core.errors import ErrorKind

# labels of every per-model family. engine: vLLM's replica number; there is only one here
LABELS = ("model_name", "engine")
ENGINE_INDEX = "0"

# Bounds in seconds: vLLM's, with finer ones added. A small model on a fast machine takes a
# millisecond per token, and a cached prompt ten.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_LATENCY_BUCKETS = (
    *(0.01, 0.03, 0.1),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

# tokens: 1, 2, 5, 10, … 1,000,000; vLLM's end at the model's context length, but there are many
# models
TOKEN_COUNT_BUCKETS = (*(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5)), 1_000_000)
CHOICE_COUNT_BUCKETS = (1, 2, 5, 10, 20)

HistogramKey = Literal[
    "first",
    "per_token",
    "e2e",
    "load",
    "queue",
    "prefill",
    "decode",
    "inference",
    "prompt",
    "computed",
    "answer",
    "asked",
    "choices",
]

HISTOGRAMS: Mapping[HistogramKey, tuple[str, str, Sequence[float]]] = {
    "first": (
        "vllm:time_to_first_token_seconds",
        "Time from a request's arrival to its first output token",
        TTFT_BUCKETS,
    ),
    "per_token": (
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token, observed once for each finished choice",
        TOKEN_LATENCY_BUCKETS,
    ),
    "e2e": (
        "vllm:e2e_request_latency_seconds",
        "Time from a request's arrival to the end of its response",
        REQUEST_LATENCY_BUCKETS,
    ),
    "load": (
        "mlxrunner_request_load_time_seconds",
        "Time from a request's arrival until its model was loaded, if it was not loaded yet",
        REQUEST_LATENCY_BUCKETS,
    ),
    "queue": (
        "vllm:request_queue_time_seconds",
        "Time that a request waited to start in the engine, excluding model loading",
        REQUEST_LATENCY_BUCKETS,
    ),
    "prefill": (
        "vllm:request_prefill_time_seconds",
        "Time from the start in the engine to the first token",
        REQUEST_LATENCY_BUCKETS,
    ),
    "decode": (
        "vllm:request_decode_time_seconds",
        "Time from the first token to the last",
        REQUEST_LATENCY_BUCKETS,
    ),
    "inference": (
        "vllm:request_inference_time_seconds",
        "Time from the start in the engine to the last token",
        REQUEST_LATENCY_BUCKETS,
    ),
    "prompt": ("vllm:request_prompt_tokens", "Prompt tokens", TOKEN_COUNT_BUCKETS),
    "computed": (
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens not taken from the prefix cache",
        TOKEN_COUNT_BUCKETS,
    ),
    "answer": (
        "vllm:request_generation_tokens",
        "Generated tokens of a choice",
        TOKEN_COUNT_BUCKETS,
    ),
    "asked": (
        "vllm:request_params_max_tokens",
        "max_tokens of the requests that set it",
        TOKEN_COUNT_BUCKETS,
    ),
    "choices": (
        "vllm:request_params_n",
        "Choices requested for each prompt (n)",
        CHOICE_COUNT_BUCKETS,
    ),
}

# the finish reasons of an engine request in vLLM
FinishedReason = Literal["stop", "length", "abort", "error"]
FINISHED_REASONS: Sequence[FinishedReason] = ("stop", "length", "abort", "error")


# errors that occur on a healthy server, or that an alert may use
_ERRORS_FROM_ZERO = (
    ErrorKind.INVALID,
    ErrorKind.CONTEXT_LENGTH,
    ErrorKind.BUSY,
    ErrorKind.LOADING,
    ErrorKind.DEADLINE,
    ErrorKind.STOPPING,
    ErrorKind.ENGINE,
    ErrorKind.MODEL_FILES,
    "internal_error",
)


class MetricFamilies:
    """The families of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histograms: Mapping[HistogramKey, Histogram] = {
            key: Histogram(name, text, LABELS, buckets=bounds, registry=registry)
            for key, (name, text, bounds) in HISTOGRAMS.items()
        }
        self._finished = Counter(
            "vllm:request_success",
            "Finished choices by finish reason",
            [*LABELS, "finished_reason"],
            registry=registry,
        )
        self._errors = Counter(
            "mlxrunner_request_errors",
            "Failed requests by error type",
            [*LABELS, "reason"],
            registry=registry,
        )
        self._embeddings = Counter(
            "mlxrunner_embedding_requests",
            "Completed and cancelled embedding requests, by outcome",
            [*LABELS, "outcome"],
            registry=registry,
        )
        self._inter_token_latency = InterTokenLatency()
        registry.register(self._inter_token_latency)

    def for_model(self, model: str) -> "ModelMetrics":
        labels = (model, ENGINE_INDEX)
        return ModelMetrics(
            histograms={key: family.labels(*labels) for key, family in self._histograms.items()},
            finished={
                reason: self._finished.labels(*labels, reason) for reason in FINISHED_REASONS
            },
            errors=self._errors,
            embeddings=self._embeddings,
            inter_token_latency=self._inter_token_latency,
            model=model,
        )


class ModelMetrics:
    """The metrics of one model."""

    def __init__(
        self,
        *,
        histograms: Mapping[HistogramKey, Histogram],
        finished: Mapping[FinishedReason, Counter],
        errors: Counter,
        embeddings: Counter,
        inter_token_latency: "InterTokenLatency",
        model: str,
    ) -> None:
        self._histograms = histograms
        self._finished = finished
        self._errors = errors
        self._embeddings = embeddings
        self._inter_token_latency = inter_token_latency
        self._model = model
        # exported from zero, because an increase is visible only if the counter existed before
        inter_token_latency.add(model, ())
        for kind in _ERRORS_FROM_ZERO:
            errors.labels(model, ENGINE_INDEX, kind)
        for outcome in ("done", "cancelled"):
            embeddings.labels(model, ENGINE_INDEX, outcome)

    def observe(self, key: HistogramKey, amount: float) -> None:
        self._histograms[key].observe(amount)

    def observe_inter_token(self, nanoseconds: Sequence[int]) -> None:
        self._inter_token_latency.add(self._model, nanoseconds)

    def count_finished(self, reason: FinishedReason, count: int = 1) -> None:
        self._finished[reason].inc(count)

    def count_error(self, kind: str) -> None:
        self._errors.labels(self._model, ENGINE_INDEX, kind).inc()

    def count_embedding(self, outcome: Literal["done", "cancelled"]) -> None:
        self._embeddings.labels(self._model, ENGINE_INDEX, outcome).inc()


class InterTokenLatency(Collector):
    """A histogram of the time between tokens. A response may have tens of thousands of values,
    which are recorded together on the event loop. For 32,768 values, the library's histogram takes
    48 ms and this class takes five."""

    NAME = "vllm:inter_token_latency_seconds"
    TEXT = "Time between consecutive output tokens, recorded when the choice finishes"

    def __init__(self) -> None:
        self._bounds = [round(bound * 1e9) for bound in TOKEN_LATENCY_BUCKETS]
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, int] = {}

    def add(self, model: str, nanoseconds: Iterable[int]) -> None:
        counts = self._counts.setdefault(model, [0] * (len(self._bounds) + 1))
        total, bounds = 0, self._bounds
        for gap in nanoseconds:
            counts[bisect_left(bounds, gap)] += 1
            total += gap
        self._sums[model] = self._sums.get(model, 0) + total

    def describe(self) -> Iterator[Metric]:
        return iter((HistogramMetricFamily(self.NAME, self.TEXT, labels=LABELS),))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.NAME, self.TEXT, labels=LABELS)
        bounds = [*map(str, TOKEN_LATENCY_BUCKETS), "+Inf"]
        # use copies, each made in one step, because this runs on a thread while the event loop
        # calls `add`
        for model, counts in list(self._counts.items()):
            bucket_counts = list(counts)
            buckets = list(zip(bounds, map(float, accumulate(bucket_counts)), strict=True))
            family.add_metric([model, ENGINE_INDEX], buckets, sum_value=self._sums[model] / 1e9)
        yield family
