"""Records metrics of requests while they run, per model.

Knows: the meaning of response events for the timing. Must not know: the names of families, the
generation of responses.

The definitions are vLLM's (vllm/v1/metrics/stats.py). A request for n choices counts as n engine
requests, and each is counted and timed when it finishes. The time to first token is recorded when
that token arrives. The queue time ends when the engine starts the request. Prefill ends with the
first token, and decode with the last one; inference time covers both. There are two differences:
tokenization counts as queue time, and the end-of-sequence token is not counted.
"""

import time

from prometheus_client import CollectorRegistry

from app.api.metrics.request_metrics import FinishedReason, MetricFamilies, ModelMetrics
from app.core.embeddings import Embeddings, EmbedRequest
from app.core.errors import AppError
from app.core.events import (
    Event,
    Finish,
    FinishReason,
    ModelLoading,
    PrefillProgress,
    PromptTokenIds,
)
from app.core.observers import count_choices
from app.core.requests import GenerateRequest

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

    def observe(
        self, request: GenerateRequest | EmbedRequest
    ) -> "GenerateObserver | EmbedObserver":
        model = self.for_model(request.model)
        if isinstance(request, EmbedRequest):
            return EmbedObserver(model)
        return GenerateObserver(model, request)


class GenerateObserver:
    """Records the times of one generate request (`app.core.observers.RequestObserver`)."""

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
            case PrefillProgress() | PromptTokenIds():
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
