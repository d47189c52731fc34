"""What is counted of requests as they go by, model by model.

Knows: prometheus_client, vLLM's names and bounds. Must not know: how answers are made.

vLLM's meanings, from vllm/v1/metrics/stats.py: a request of n choices is n requests of the engine,
each of which is counted and timed when it finishes; the time to the first token is taken when that
is there, whatever comes after it. The queue is left behind with the start in the engine, prefill
ends with the first token, decode with the last one; inference is both. Ours differ in two points:
the queue has the tokenizing in it, and the end-of-sequence token is not counted.
"""

import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from app.api.metrics.engines import ENGINE, LABELS
from app.core.embeddings import Embeddings, EmbedRequest
from app.core.errors import AppError
from app.core.events import (
    CallDelta,
    Event,
    Finish,
    FinishReason,
    Loading,
    ReasoningDelta,
    TextDelta,
)
from app.core.requests import GenerateRequest
from app.core.watched import choices_of

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

# vLLM's words for how a request of the engine ends. A call is no reason of its own there.
REASONS = ("stop", "length", "abort", "error")
_REASON: dict[FinishReason, str] = {"stop": "stop", "tool_calls": "stop", "length": "length"}


class RequestFigures:
    """Families of one registry. served: the name under which a model of a request is told, or None
    for one that is not served: what a client made up is no label."""

    def __init__(
        self, registry: CollectorRegistry, served: Callable[[str], str | None]
    ) -> None:
        self._served = served
        self._models: dict[str, _Model] = {}

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(name, text, LABELS, buckets=bounds, registry=registry)

        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, [*LABELS, label], registry=registry)

        self.success = counter(
            "vllm:request_success", "Choices by how they ended", "finished_reason"
        )
        self.errors = counter(
            "mlxrunner_request_errors",
            "Requests that were refused or broke off, by the kind of the error",
            "reason",
        )
        self.embeddings = counter(
            "mlxrunner_embedding_requests", "Requests for vectors that had no error", "outcome"
        )
        self.first = histogram(
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to the first piece of its answer",
            FIRST,
        )
        self.between = histogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens of an answer, as the engine drew them; told when it finishes",
            BETWEEN,
        )
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between two tokens of an answer, one count for each finished answer",
            BETWEEN,
        )
        self.whole = histogram(
            "vllm:e2e_request_latency_seconds",
            "From a request's arrival to the end of its answer",
            WHOLE,
        )
        self.load = histogram(
            "mlxrunner_request_load_time_seconds",
            "From a request's arrival until its model was loaded, where it was not",
            WHOLE,
        )
        self.queue = histogram(
            "vllm:request_queue_time_seconds",
            "From a request's arrival, its model being loaded, to its start in the engine",
            WHOLE,
        )
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds",
            "From the start in the engine to the first token",
            WHOLE,
        )
        self.decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last", WHOLE
        )
        self.inference = histogram(
            "vllm:request_inference_time_seconds",
            "From the start in the engine to the last token",
            WHOLE,
        )
        self.prompt = histogram("vllm:request_prompt_tokens", "Tokens of a prompt", TOKENS)
        self.computed = histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Tokens of a prompt that were not taken from the prefix cache",
            TOKENS,
        )
        self.answer = histogram("vllm:request_generation_tokens", "Tokens of an answer", TOKENS)
        self.asked = histogram(
            "vllm:request_params_max_tokens",
            "The limit that a request set itself, where it set one",
            TOKENS,
        )
        self.choices = histogram("vllm:request_params_n", "Answers that a request wants", CHOICES)

    def of(self, model: str) -> "_Model":
        """A model's own; "" is whatever is not served. Those that count from zero begin to."""
        name = self._served(model) or ""
        if name not in self._models:
            self._models[name] = _Model(self, name)
        return self._models[name]

    def watch(self, request: GenerateRequest | EmbedRequest) -> "RequestWatch | EmbedWatch":
        model = self.of(request.model)
        if isinstance(request, EmbedRequest):
            return EmbedWatch(model)
        return RequestWatch(model, request)


class _Model:
    """The families' children of one model."""

    def __init__(self, all_: RequestFigures, name: str) -> None:
        labels = (name, ENGINE)
        self.success = {reason: all_.success.labels(*labels, reason) for reason in REASONS}
        self.errors = lambda reason: all_.errors.labels(*labels, reason)
        self.embeddings = lambda outcome: all_.embeddings.labels(*labels, outcome)
        self.first = all_.first.labels(*labels)
        self.between = all_.between.labels(*labels)
        self.per_token = all_.per_token.labels(*labels)
        self.whole = all_.whole.labels(*labels)
        self.load = all_.load.labels(*labels)
        self.queue = all_.queue.labels(*labels)
        self.prefill = all_.prefill.labels(*labels)
        self.decode = all_.decode.labels(*labels)
        self.inference = all_.inference.labels(*labels)
        self.prompt = all_.prompt.labels(*labels)
        self.computed = all_.computed.labels(*labels)
        self.answer = all_.answer.labels(*labels)
        self.asked = all_.asked.labels(*labels)
        self.choices = all_.choices.labels(*labels)
