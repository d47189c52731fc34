"""The families of figures that are counted request by request: names, words, bounds.

Knows: prometheus_client, vLLM's names and bounds (vllm/v1/metrics/loggers.py). Must not know: what
a request is, when anything is counted.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.core.errors import Kind

# of every family that tells of a model. engine: vLLM's number of a replica, of which we have one
LABELS = ("model_name", "engine")
ENGINE = "0"

# Bounds in seconds. vLLM's, with finer ones below: a small model on a good machine takes a
# millisecond for a token, and a cached prompt ten.
FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN = (
    *(0.001, 0.002, 0.004, 0.006, 0.008),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
WHOLE = (
    *(0.01, 0.03, 0.1),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

# tokens: 1, 2, 5, 10, … 1,000,000; vLLM's end with the model's context, and there are many models
TOKENS = (*(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5)), 1_000_000)
CHOICES = (1, 2, 5, 10, 20)

Timed = Literal[
    "first",
    "per_token",
    "whole",
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

HISTOGRAMS: Mapping[Timed, tuple[str, str, Sequence[float]]] = {
    "first": (
        "vllm:time_to_first_token_seconds",
        "Time from a request's arrival to its first output token",
        FIRST,
    ),
    "per_token": (
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token, observed once for each finished choice",
        BETWEEN,
    ),
    "whole": (
        "vllm:e2e_request_latency_seconds",
        "Time from a request's arrival to the end of its response",
        WHOLE,
    ),
    "load": (
        "mlxrunner_request_load_time_seconds",
        "Time from a request's arrival until its model was loaded, if it was not",
        WHOLE,
    ),
    "queue": (
        "vllm:request_queue_time_seconds",
        "Time a request waited to start in the engine, model loading excluded",
        WHOLE,
    ),
    "prefill": (
        "vllm:request_prefill_time_seconds",
        "Time from the start in the engine to the first token",
        WHOLE,
    ),
    "decode": ("vllm:request_decode_time_seconds", "Time from the first token to the last", WHOLE),
    "inference": (
        "vllm:request_inference_time_seconds",
        "Time from the start in the engine to the last token",
        WHOLE,
    ),
    "prompt": ("vllm:request_prompt_tokens", "Prompt tokens", TOKENS),
    "computed": (
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens not taken from the prefix cache",
        TOKENS,
    ),
    "answer": ("vllm:request_generation_tokens", "Generated tokens of a choice", TOKENS),
    "asked": (
        "vllm:request_params_max_tokens",
        "max_tokens of the requests that set it",
        TOKENS,
    ),
    "choices": ("vllm:request_params_n", "Choices requested for each prompt (n)", CHOICES),
}

# vLLM's words for how a request of the engine ends
Ending = Literal["stop", "length", "abort", "error"]
ENDINGS: Sequence[Ending] = ("stop", "length", "abort", "error")


# errors that happen to a server that is well, or that somebody is to hear of
_EXPECTED = (
    Kind.INVALID,
    Kind.CONTEXT_LENGTH,
    Kind.BUSY,
    Kind.LOADING,
    Kind.DEADLINE,
    Kind.STOPPING,
    Kind.ENGINE,
    Kind.MODEL_FILES,
    "internal_error",
)


class Families:
    """Those of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histograms: Mapping[Timed, Histogram] = {
            key: Histogram(name, text, LABELS, buckets=bounds, registry=registry)
            for key, (name, text, bounds) in HISTOGRAMS.items()
        }
        self._ended = Counter(
            "vllm:request_success",
            "Finished choices by finish reason",
            [*LABELS, "finished_reason"],
            registry=registry,
        )
        self._errors = Counter(
            "mlxrunner_request_errors",
            "Requests that failed, by kind of error",
            [*LABELS, "reason"],
            registry=registry,
        )
        self._embeddings = Counter(
            "mlxrunner_embedding_requests",
            "Embedding requests that did not fail, by outcome",
            [*LABELS, "outcome"],
            registry=registry,
        )
        self._gaps = Gaps()
        registry.register(self._gaps)

    def of(self, model: str) -> "OfModel":
        labels = (model, ENGINE)
        return OfModel(
            times={key: family.labels(*labels) for key, family in self._histograms.items()},
            ended={reason: self._ended.labels(*labels, reason) for reason in ENDINGS},
            errors=self._errors,
            embeddings=self._embeddings,
            gaps=self._gaps,
            model=model,
        )


class OfModel:
    """What is counted of one model."""

    def __init__(
        self,
        *,
        times: Mapping[Timed, Histogram],
        ended: Mapping[Ending, Counter],
        errors: Counter,
        embeddings: Counter,
        gaps: "Gaps",
        model: str,
    ) -> None:
        self._times = times
        self._ended = ended
        self._errors = errors
        self._embeddings = embeddings
        self._gaps = gaps
        self._model = model
        # told from zero: whoever asks how much a counter grew must see it before it does
        gaps.add(model, ())
        for kind in _EXPECTED:
            errors.labels(model, ENGINE, kind)
        for outcome in ("done", "cancelled"):
            embeddings.labels(model, ENGINE, outcome)

    def observe(self, key: Timed, amount: float) -> None:
        self._times[key].observe(amount)

    def gaps(self, nanoseconds: Sequence[int]) -> None:
        self._gaps.add(self._model, nanoseconds)

    def ended(self, how: Ending, count: int = 1) -> None:
        self._ended[how].inc(count)

    def error(self, kind: str) -> None:
        self._errors.labels(self._model, ENGINE, kind).inc()

    def embedding(self, outcome: Literal["done", "cancelled"]) -> None:
        self._embeddings.labels(self._model, ENGINE, outcome).inc()


class Gaps(Collector):
    """The time between tokens. An answer may have tens of thousands, which are told at once, on the
    event loop: the library's own histogram takes 48 ms for 32,768, and this one takes five."""

    NAME = "vllm:inter_token_latency_seconds"
    TEXT = "Time between consecutive output tokens, recorded when the choice finishes"

    def __init__(self) -> None:
        self._bounds = [round(bound * 1e9) for bound in BETWEEN]
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
        bounds = [*map(str, BETWEEN), "+Inf"]
        # copies, each made at once: this runs on a thread, beside the event loop's `add`
        for model, counts in list(self._counts.items()):
            told = list(counts)
            buckets = list(zip(bounds, map(float, accumulate(told)), strict=True))
            family.add_metric([model, ENGINE], buckets, sum_value=self._sums[model] / 1e9)
        yield family
