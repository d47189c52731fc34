"""Exports traces to an OpenTelemetry collector: one span per generation or embedding request.

Knows: OpenTelemetry's SDK, its conventions for errors and for generative AI. Must not know: HTTP,
how output is generated. As of November 2026, the conventions for generative AI
(semantic-conventions-genai, docs/gen-ai/gen-ai-spans.md) are still in development.

Spans never contain prompts, output, stop strings, tools or keys.
"""

import asyncio
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from app.core.distributions import get_own_version
from app.core.errors import AppError, ErrorKind
from app.core.events import Event, Finish, ModelLoading, Timings
from app.core.request_context import REQUEST_CONTEXT
from app.core.requests import Conversation, Embeddings, EmbedRequest, GenerateRequest
from app.core.settings import Settings

# the timeouts in seconds for one export, and for the last exports when the server stops
_EXPORT_TIMEOUT = 5.0
_SHUTDOWN_TIMEOUT = 3.0

_MAX_NAME_LENGTH = 200

# Client errors. As for HTTP 4xx responses, the status of the server span is not an error.
_CLIENT_ERRORS = frozenset(
    {
        ErrorKind.INVALID,
        ErrorKind.CONTEXT_LENGTH,
        ErrorKind.NOT_FOUND,
        ErrorKind.MODEL_NOT_FOUND,
        ErrorKind.METHOD_NOT_ALLOWED,
        ErrorKind.UNSUPPORTED_MEDIA_TYPE,
        ErrorKind.TOO_LARGE,
        ErrorKind.UNAUTHORIZED,
        ErrorKind.FORBIDDEN,
        ErrorKind.REQUEST_TIMEOUT,
        ErrorKind.BUSY,
    }
)

# fields of SamplingParams with an attribute in the conventions
_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")


class OtelTracing:
    """Exports spans in batches on a separate thread. If the collector is slow
    or unreachable, spans that do not fit in the queue are dropped. Requests are not affected."""

    def __init__(self, settings: Settings) -> None:
        """Raises AppError(INVALID) if `settings.otlp` is not a URL."""
        address = _resolve_traces_endpoint(settings.otlp or "")
        self._exporter = OTLPSpanExporter(endpoint=address, timeout=_EXPORT_TIMEOUT)
        resource = Resource.create(
            {"service.name": "mlxrunner", "service.version": get_own_version()}
        )
        # no exit handler, because it could delay the exit; `stop` shuts the provider down
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("mlxrunner")
        self._server: Mapping[str, AttributeValue] = {
            "server.address": settings.host,
            "server.port": settings.port,
        }

    def observe(self, request: GenerateRequest | EmbedRequest) -> "RequestSpan":
        """Starts the span of a request. This method is an `ObserverFactory`."""
        attributes = {**self._server, **_request_attributes(request)}
        visit = REQUEST_CONTEXT.get()
        carried = {} if visit is None else {"traceparent": visit.traceparent}
        if visit is not None:
            attributes["mlxrunner.request.id"] = visit.id
        if request.caller:
            attributes["mlxrunner.caller"] = request.caller
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}",
            context=TraceContextTextMapPropagator().extract(carried, context=Context()),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        return RequestSpan(self, span, request.model)

    def add_child_span(self, parent: Span, name: str, start: int, end: int, choice: int) -> None:
        """Adds the span of a phase of a request. start, end: the Unix times in ns."""
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent, Context()),
            attributes={"mlxrunner.choice": choice},
            start_time=start,
        )
        span.end(end_time=end)

    async def stop(self) -> None:
        """Exports the remaining spans. This takes at most a few seconds."""
        # use a daemon thread, so that the process exits even if the collector does not respond
        last = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        last.start()
        await asyncio.to_thread(last.join, _SHUTDOWN_TIMEOUT)
        if last.is_alive():
            self._exporter.shutdown()  # stops retries and further exports


class RequestSpan:
    """The span of one request. Implements `app.core.request_lifecycle.RequestObserver`."""

    def __init__(self, spans: OtelTracing, span: Span, model: str) -> None:
        self._spans = spans
        self._model = model
        self._span = span
        # the start as Unix time, from which later times are computed with the monotonic clock
        self._started_ns = time.time_ns()
        self._started_monotonic_ns = time.monotonic_ns()
        self._loaded_ns = self._started_ns
        self._loading = False
        self._error: str | None = None
        self._reasons: list[str] = []
        self._prompt_tokens: dict[int, tuple[int, int]] = {}
        self._output_tokens = self._reasoning_tokens = 0

    def on_event(self, event: Event) -> None:
        if isinstance(event, ModelLoading):
            self._loading = True
            return
        if self._loading:
            self._loading = False
            self._loaded_ns = self._unix_time_ns()
            self._spans.add_child_span(self._span, "load", self._started_ns, self._loaded_ns, 0)
        if isinstance(event, Finish):
            self._on_finish(event)

    def on_embeddings(self, found: Embeddings) -> None:
        self._span.set_attribute("gen_ai.usage.input_tokens", found.prompt_tokens)

    def on_error(self, error: Exception) -> None:
        if self._error is not None:
            return
        known = isinstance(error, AppError)
        self._error = error.kind.value if known else type(error).__qualname__
        # set no description, because the message may quote the request
        if not known or error.kind not in _CLIENT_ERRORS:
            self._span.set_status(Status(StatusCode.ERROR))

    def on_end(self, *, complete: bool) -> None:
        span = self._span
        if self._error is None and not complete:
            self._error = "cancelled"
        if self._error is not None:
            span.set_attribute("error.type", self._error)
        if self._reasons:
            lengths = self._prompt_tokens.values()
            span.set_attributes(
                {
                    "gen_ai.response.model": self._model,
                    "gen_ai.response.finish_reasons": self._reasons,
                    "gen_ai.usage.input_tokens": sum(length for length, _ in lengths),
                    "gen_ai.usage.cache_read.input_tokens": sum(cached for _, cached in lengths),
                    "gen_ai.usage.output_tokens": self._output_tokens,
                    "gen_ai.usage.reasoning.output_tokens": self._reasoning_tokens,
                }
            )
        span.end(end_time=self._unix_time_ns())

    def _unix_time_ns(self) -> int:
        return self._started_ns + time.monotonic_ns() - self._started_monotonic_ns

    def _on_finish(self, event: Finish) -> None:
        usage = event.usage
        self._reasons.append(event.reason)
        # count each prompt once, regardless of the number of choices
        self._prompt_tokens.setdefault(
            event.prompt_index, (usage.prompt_tokens, usage.cached_tokens)
        )
        self._output_tokens += usage.completion_tokens
        self._reasoning_tokens += usage.reasoning_tokens
        for name, start, end in split_phases(self._loaded_ns, event.timings):
            self._spans.add_child_span(self._span, name, start, end, event.choice)


def split_phases(arrived: int, timings: Timings) -> list[tuple[str, int, int]]:
    """Returns the consecutive phases of a choice, as (name, start, end). All times, including
    `arrived`, are Unix times in ns.

        |-- queue --|-- prefill --|-- decode --|
    """
    end = arrived + timings.total_ns
    first = end - timings.decode_ns
    started = first - timings.prefill_ns
    return [
        ("queue", min(arrived, started), started),
        ("prefill", started, first),
        ("decode", first, end),
    ]


def _request_attributes(request: GenerateRequest | EmbedRequest) -> dict[str, AttributeValue]:
    """Returns the span attributes that are known from the request."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.provider.name": "mlxrunner",
        "gen_ai.request.model": request.model[:_MAX_NAME_LENGTH],
    }
    if isinstance(request, EmbedRequest):
        attributes["gen_ai.operation.name"] = "embeddings"
        if request.dimensions is not None:
            attributes["gen_ai.embeddings.dimension.count"] = request.dimensions
        return attributes
    chat = isinstance(request.prompt, Conversation)
    attributes["gen_ai.operation.name"] = "chat" if chat else "text_completion"
    if request.n != 1:
        attributes["gen_ai.request.choice.count"] = request.n
    if request.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = request.max_tokens
    for name in _SAMPLING:
        value = request.sampling.get(name)
        if isinstance(value, int | float):
            attributes[f"gen_ai.request.{name}"] = value
    return attributes


def _resolve_traces_endpoint(address: str) -> str:
    """Returns the URL for traces at a collector. `/v1/traces` is appended unless the address has a
    path (see OpenTelemetry's OTLP Exporter Configuration). Raises AppError(INVALID) for an invalid
    address."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AppError(
            ErrorKind.INVALID,
            f"--otlp must be the URL of a collector, such as http://127.0.0.1:4318, not "
            f"{address[:200]!r}",
            param="otlp",
        )
    return address if parts.path.strip("/") else f"{address.rstrip('/')}/v1/traces"
