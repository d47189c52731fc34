"""Metrics of requests: the metric families, and an observer that records them while requests run.

Knows: prometheus_client, vLLM's names and bounds (vllm/v1/metrics/loggers.py), the meaning of
response events for the timing. Must not know: the generation of responses.

The definitions are vLLM's (vllm/v1/metrics/stats.py). A request for n choices counts as n engine
requests, and each is counted and timed when it finishes. The time to first token is recorded when
that token arrives. The queue time ends when the engine starts the request. Prefill ends with the
first token, and decode with the last one; inference time covers both. There are two differences:
tokenization counts as queue time, and the end-of-sequence token is not counted.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.api.metrics.llamacpp import GenerationTimes
from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Event,
    Finish,
    FinishReason,
    ModelLoading,
    PrefillProgress,
    PromptTokenIds,
    PromptTokenLogprobs,
    Usage,
)
from app.core.request_lifecycle import count_choices
from app.core.requests import Embeddings, EmbedRequest, GenerateRequest

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
        "Time from a request's arrival until its model is loaded, for cold starts only",
        REQUEST_LATENCY_BUCKETS,
    ),
    "queue": (
        "vllm:request_queue_time_seconds",
        "Time that a request waited to start in the engine, excluding model loading",
        REQUEST_LATENCY_BUCKETS,
    ),
    "prefill": (
        "vllm:request_prefill_time_seconds",
        "Time from when the engine starts a request to the first token",
        REQUEST_LATENCY_BUCKETS,
    ),
    "decode": (
        "vllm:request_decode_time_seconds",
        "Time from the first token to the last",
        REQUEST_LATENCY_BUCKETS,
    ),
    "inference": (
        "vllm:request_inference_time_seconds",
        "Time from when the engine starts a request to the last token",
        REQUEST_LATENCY_BUCKETS,
    ),
    "prompt": ("vllm:request_prompt_tokens", "Prompt tokens", TOKEN_COUNT_BUCKETS),
    "computed": (
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens not found in the prefix cache",
        TOKEN_COUNT_BUCKETS,
    ),
    "answer": (
        "vllm:request_generation_tokens",
        "Generated tokens per choice",
        TOKEN_COUNT_BUCKETS,
    ),
    "asked": (
        "vllm:request_params_max_tokens",
        "max_tokens, for requests that set it",
        TOKEN_COUNT_BUCKETS,
    ),
    "choices": (
        "vllm:request_params_n",
        "Choices requested per prompt (n)",
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
    """The metrics of one model. prefill_seconds, decode_seconds: the sums over all finished
    choices. max_tokens: the number of tokens of the longest choice, including its prompt."""

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
        self.prefill_seconds = self.decode_seconds = 0.0
        self.max_tokens = 0
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

    def add_finished(self, usage: Usage, prefill: float, decode: float) -> None:
        self.prefill_seconds += prefill
        self.decode_seconds += decode
        self.max_tokens = max(self.max_tokens, usage.prompt_tokens + usage.completion_tokens)

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


# vLLM has no separate finish reason for tool calls
_FINISHED_REASON: dict[FinishReason, FinishedReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
}


class RequestMetrics:
    """Metrics by model. Only served models become labels; arbitrary names from clients do not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families = MetricFamilies(registry)
        self._models: dict[str, ModelMetrics] = {}

    def for_model(self, name: str) -> ModelMetrics:
        """Returns the metrics of a served model. On first use, creates them at zero."""
        if name not in self._models:
            self._models[name] = self._families.for_model(name)
        return self._models[name]

    def sum_times(self) -> GenerationTimes:
        models = self._models.values()
        return GenerationTimes(
            prefill=sum(model.prefill_seconds for model in models),
            decode=sum(model.decode_seconds for model in models),
            max_tokens=max((model.max_tokens for model in models), default=0),
        )

    def observe(
        self, request: GenerateRequest | EmbedRequest
    ) -> "GenerateObserver | EmbedObserver":
        model = self.for_model(request.model)
        if isinstance(request, EmbedRequest):
            return EmbedObserver(model)
        return GenerateObserver(model, request)


class GenerateObserver:
    """Records the timings of one generate request. Implements `RequestObserver`."""

    def __init__(self, model: ModelMetrics, request: GenerateRequest) -> None:
        self._model = model
        # an echoed prompt is sent before any token is computed
        self._echo = request.echo
        self._choices_left = count_choices(request)
        self._started_choices: set[int] = set()
        self._failed = self._loading = False
        self._arrived = time.monotonic()
        model.observe("choices", request.n)
        if request.max_tokens is not None:
            model.observe("asked", request.max_tokens)

    def on_event(self, event: Event) -> None:
        if self._loading and not isinstance(event, ModelLoading):
            self._loading = False
            self._model.observe("load", self._elapsed())
        match event:
            case ModelLoading():
                self._loading = True
            case PrefillProgress() | PromptTokenIds() | PromptTokenLogprobs():
                pass
            case Finish():
                self._finish(event)
            case _ if not self._echo:
                self._observe_first_token(event.choice, self._elapsed())
            case _:
                pass

    def on_embeddings(self, found: Embeddings) -> None:
        raise AssertionError("a generation request received embeddings")

    def on_error(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._model.count_error(_error_kind(error))

    def on_end(self, *, complete: bool) -> None:
        """Ends the request. A choice that has not finished was either ended by an error or
        cancelled."""
        if not complete and (self._started_choices or not self._failed):
            self._model.count_finished("error" if self._failed else "abort", self._choices_left)

    def _elapsed(self) -> float:
        return time.monotonic() - self._arrived

    def _observe_first_token(self, choice: int, seconds: float) -> None:
        if choice not in self._started_choices:
            self._started_choices.add(choice)
            self._model.observe("first", seconds)

    def _finish(self, event: Finish) -> None:
        model, usage, timings = self._model, event.usage, event.timings
        self._choices_left -= 1
        decode = timings.decode_ns / 1e9
        prefill = timings.prefill_ns / 1e9
        self._observe_first_token(event.choice, max(0.0, self._elapsed() - decode))
        model.count_finished(_FINISHED_REASON[event.reason])
        model.add_finished(usage, prefill, decode)
        model.observe("e2e", self._elapsed())
        model.observe("queue", max(0.0, timings.total_ns / 1e9 - prefill - decode))
        model.observe("prefill", prefill)
        model.observe("decode", decode)
        model.observe("inference", prefill + decode)
        model.observe("prompt", usage.prompt_tokens)
        model.observe("computed", usage.prompt_tokens - usage.cached_tokens)
        model.observe("answer", usage.completion_tokens)
        if usage.completion_tokens > 1:
            model.observe("per_token", decode / (usage.completion_tokens - 1))
        model.observe_inter_token(timings.inter_token_ns)


class EmbedObserver:
    """Records an embeddings request."""

    def __init__(self, model: ModelMetrics) -> None:
        self._model = model
        self._finished = False

    def on_event(self, event: Event) -> None:
        raise AssertionError("an embedding request received text")

    def on_embeddings(self, found: Embeddings) -> None:
        self._finished = True
        self._model.count_embedding("done")

    def on_error(self, error: Exception) -> None:
        self._finished = True
        self._model.count_error(_error_kind(error))

    def on_end(self, *, complete: bool) -> None:
        if not self._finished:
            self._model.count_embedding("cancelled")


def _error_kind(error: Exception) -> str:
    return error.kind.value if isinstance(error, AppError) else "internal_error"
