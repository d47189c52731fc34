"""/metrics: what Prometheus scrapes.

Knows: prometheus_client, the names and units of our figures. Must not know: how any of it is
counted below. Each number has one writer: the engine's are read from its status when somebody
scrapes, and those of a request's life are noted here, by standing between HTTP and what generates.

Names, suffixes and meanings follow vLLM's (`vllm:num_requests_running` is our
`mlxrunner_num_requests_running`), so that a dashboard needs only another prefix.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.core.embeddings import Embeddings, EmbedRequest
from app.core.errors import AppError
from app.core.events import Event, Finish, Progress, TextDelta
from app.core.jobs import HIT_BOUNDS, EngineStats
from app.core.ports import Generate, ModelCard, RunnerState, RunnerStatus
from app.core.requests import GenerateRequest
from app.core.residents import ModelState

# Seconds. A queue, and a prompt, take from nothing to minutes.
WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)

# Seconds. A small model on a good machine takes a millisecond for a token.
PER_TOKEN = (0.001, 0.002, 0.004, 0.008, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.75, 2.5)

STATES: tuple[RunnerState, ...] = ("loading", "ready", "stalled", "failed")


class Metrics:
    """Figures of one server, in a registry of its own."""

    def __init__(self, generate: Generate) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineFigures(generate))
        self.measured: Generate = Measured(generate, RequestFigures(self._registry))

    def routes(self) -> list[Route]:
        async def metrics(request: Request) -> Response:
            return Response(
                generate_latest(self._registry),
                headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4},
            )

        return [Route("/metrics", metrics, methods=["GET"])]


class RequestFigures:
    """What is counted here, request by request."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ended = Counter(
            "mlxrunner_requests",
            "Requests by their end: a finish reason, embedded, cancelled, or a kind of error",
            ["outcome"],
            registry=registry,
        )
        self.queue = Histogram(
            "mlxrunner_request_queue_time_seconds",
            "From a request's arrival to its start in the engine, tokenizing included",
            buckets=WAITS,
            registry=registry,
        )
        self.first = Histogram(
            "mlxrunner_time_to_first_token_seconds",
            "From a request's arrival to the first text of its answer",
            buckets=WAITS,
            registry=registry,
        )
        self.per_token = Histogram(
            "mlxrunner_request_time_per_output_token_seconds",
            "Mean time between two tokens of an answer, one count for each finished answer",
            buckets=PER_TOKEN,
            registry=registry,
        )


class Measured:
    """`Generate`, with a watch on every request."""

    def __init__(self, generate: Generate, figures: RequestFigures) -> None:
        self._generate = generate
        self._figures = figures

    def open(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        return self._watched(request)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        outcome = "cancelled"
        try:
            found = await self._generate.embed(request)
            outcome = "embedded"
            return found
        except Exception as error:
            outcome = _outcome(error)
            raise
        finally:
            self._figures.ended.labels(outcome).inc()

    async def tokenize(self, text: str, model: str | None = None) -> Sequence[int]:
        return await self._generate.tokenize(text, model)

    async def detokenize(self, ids: Sequence[int], model: str | None = None) -> str:
        return await self._generate.detokenize(ids, model)

    async def look_for(self, model: str) -> None:
        await self._generate.look_for(model)

    def states(self) -> Sequence[ModelState]:
        return self._generate.states()

    async def load(self, model: str, keep_alive: float | None = None) -> ModelState:
        return await self._generate.load(model, keep_alive)

    async def unload(self, model: str) -> ModelState:
        return await self._generate.unload(model)

    def models(self) -> Sequence[ModelCard]:
        return self._generate.models()

    def status(self) -> RunnerStatus:
        return self._generate.status()

    @asynccontextmanager
    async def _watched(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[Event]]:
        watch = _Watch(self._figures)
        try:
            async with self._generate.open(request) as events:
                yield _Watched(events, watch)
        except Exception as error:
            watch.fail(error)
            raise
        finally:
            # whoever leaves without an end and without an error has hung up
            self._figures.ended.labels(watch.outcome or "cancelled").inc()


class _Watched:
    """Events on their way up. An iterator and no generator: leaving one half-way leaves nothing
    behind that would have to be closed."""

    def __init__(self, events: AsyncIterator[Event], watch: "_Watch") -> None:
        self._events = events
        self._watch = watch

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            raise
        except Exception as error:  # a stream tells its client, and leaves as if all were well
            self._watch.fail(error)
            raise
        self._watch.note(event)
        return event


class _Watch:
    """When one request did what for the first time."""

    def __init__(self, figures: RequestFigures) -> None:
        self.outcome: str | None = None
        self._figures = figures
        self._arrived = time.monotonic()
        self._started = self._spoke = False

    def note(self, event: Event) -> None:
        match event:
            case Progress() if not self._started:
                self._started = True
                self._figures.queue.observe(time.monotonic() - self._arrived)
            case TextDelta() if not self._spoke:
                self._spoke = True
                self._figures.first.observe(time.monotonic() - self._arrived)
            case Finish(usage=usage, timings=timings):
                self.outcome = event.reason
                if usage.completion_tokens > 1:
                    seconds = timings.eval_ns / 1e9 / (usage.completion_tokens - 1)
                    self._figures.per_token.observe(seconds)
            case _:
                pass

    def fail(self, error: Exception) -> None:
        """What happened first is how it ended."""
        self.outcome = self.outcome or _outcome(error)


def _outcome(error: Exception) -> str:
    return error.kind.value if isinstance(error, AppError) else "internal_error"


class EngineFigures(Collector):
    """What the engine counts, as it last told."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    def describe(self) -> Iterator[Metric]:
        """Nothing: so that registering asks for no status, which may not be there yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        now = self._generate.status()
        yield _gauges(
            "state",
            "1 for the state the engine is in",
            "state",
            {s: s == now.state for s in STATES},
        )
        if now.capacity is not None:
            yield _gauge("max_num_seqs", "Requests that may run at once", now.capacity.parallel)
            yield _gauge("max_model_len", "Tokens that one request may have", now.capacity.context)
        yield from _load(now.stats)
        yield from _tokens(now.stats)
        yield from _prefix_cache(now.stats)
        yield from _memory(now.stats)


def _load(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Requests in the engine", stats.running)
    yield _gauge("num_requests_waiting", "Requests that wait for a place", stats.waiting)
    yield _gauge(
        "num_requests_embedding", "Requests for vectors, waiting ones too", stats.embedding
    )
    yield _counter("engine_steps", "Turns of the engine's loop", stats.steps)
    yield _counter("num_preemptions", "Requests that began again for room", stats.preemptions)
    yield _counter("engine_failures", "Requests lost to an error of the engine", stats.failures)


def _tokens(stats: EngineStats) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "mlxrunner_prompt_tokens",
        "Prompt tokens, by whether they were computed or taken from the prefix cache",
        labels=["source"],
    )
    family.add_metric(["computed"], stats.prefilled_tokens)
    family.add_metric(["cache"], stats.cached_tokens)
    yield family
    yield _counter("generation_tokens", "Tokens of answers", stats.generated_tokens)
    yield _counter("embedded_tokens", "Tokens of inputs to vectors", stats.embedded_tokens)


def _prefix_cache(stats: EngineStats) -> Iterator[Metric]:
    bounds = [*(str(float(bound)) for bound in HIT_BOUNDS), "+Inf"]
    hits = HistogramMetricFamily(
        "mlxrunner_prefix_cache_hit_tokens", "Lookups, by how much of the prompt was cached"
    )
    buckets = list(zip(bounds, map(float, accumulate(stats.hits)), strict=True))
    # what all lookups found together is what was cached
    hits.add_metric([], buckets, sum_value=stats.cached_tokens)
    yield hits
    misses = CounterMetricFamily(
        "mlxrunner_prefix_cache_misses",
        "Lookups that found less than all, by the reason",
        labels=["reason"],
    )
    for reason, count in stats.misses:
        misses.add_metric([reason], count)
    yield misses
    yield _counter(
        "prefix_cache_evictions", "Cached prefixes that were given up for room", stats.evictions
    )


def _memory(stats: EngineStats) -> Iterator[Metric]:
    ledger = stats.ledger
    yield _gauges(
        "memory_bytes",
        "The engine's budget, line by line: their sum is mlxrunner_memory_budget_bytes",
        "line",
        {
            "weights": ledger.weights,
            "kv": ledger.kv,
            "prefix": ledger.prefix,
            "working": ledger.working,
            "free": ledger.free,
        },
    )
    yield _gauge("memory_budget_bytes", "What the engine may use in all", ledger.budget)
    yield _gauge("allocator_bytes", "What the allocator holds, its free buffers too", stats.memory)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"mlxrunner_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"mlxrunner_{name}", text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"mlxrunner_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
