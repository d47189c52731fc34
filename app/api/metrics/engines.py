"""A Prometheus collector for engine metrics, per model, read at each scrape.

Knows: prometheus_client, the mapping from vLLM's metric names to engine statistics. Must not know:
the counting of statistics.

If vLLM has a metric with the same meaning (vllm/v1/metrics/loggers.py, docs/design/metrics.md), the
family is named vllm:…, so that vLLM's dashboards work. Other families are named mlxrunner_…. A
value is exported under a second name only for llama.cpp's dashboards (llamacpp.py in this folder).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.api.metrics.request_metrics import ENGINE_INDEX, LABELS
from app.core.jobs import PREFIX_HIT_BUCKETS
from app.core.models import ModelPhase, ModelState
from app.core.ports import Models, RunnerState

_SERVER_STATES: Sequence[RunnerState] = get_args(RunnerState)
_PHASES: Sequence[ModelPhase] = get_args(ModelPhase)

MetricRow = tuple[str, str, Callable[[ModelState], float | None]]


def _kv_usage(state: ModelState) -> float:
    """Returns the fraction of KV cache memory used by running sequences. Cached prefixes that no
    sequence uses count as free, as in vLLM, because they are evicted on demand."""
    ledger = state.stats.ledger
    room = ledger.kv + ledger.prefix + ledger.free
    return ledger.kv / room if room > 0 else 0.0


# a value of None is unknown and is not exported
GAUGES: Sequence[MetricRow] = (
    ("vllm:num_requests_running", "Requests running in the engine", lambda s: s.stats.running),
    (
        "vllm:num_requests_waiting",
        "Requests waiting for the engine, including those being tokenized or compiled",
        lambda s: s.stats.waiting + s.preparing + s.compiling,
    ),
    (
        "mlxrunner_num_requests_preparing",
        "Waiting requests whose prompt is being rendered and tokenized",
        lambda s: s.preparing,
    ),
    (
        "mlxrunner_num_requests_compiling",
        "Waiting requests whose grammar is being compiled",
        lambda s: s.compiling,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Fraction of the KV cache memory that running requests use, 0 to 1",
        _kv_usage,
    ),
    (
        "mlxrunner_num_requests_embedding",
        "Embedding requests, running and waiting",
        lambda s: s.stats.embedding_jobs,
    ),
    (
        "mlxrunner_model_leases",
        "Requests that use the model or wait for it to load",
        lambda s: s.leases,
    ),
    (
        "mlxrunner_model_share_bytes",
        "Memory that the model may use, if models share the device",
        lambda s: s.allocation,
    ),
    ("mlxrunner_max_num_seqs", "Maximum number of concurrent requests", lambda s: s.parallel),
    (
        "mlxrunner_max_model_len",
        "Maximum context length of a request, in tokens",
        lambda s: s.context_length,
    ),
    (
        "mlxrunner_memory_budget_bytes",
        "Total memory budget of the engine",
        lambda s: s.stats.ledger.budget,
    ),
    (
        "mlxrunner_prefix_cache_limit_bytes",
        "Maximum size of cached prefixes, lower while the system is short of memory",
        lambda s: s.stats.ledger.prefix_limit,
    ),
    (
        "mlxrunner_wired_limit_bytes",
        "Memory that Metal may keep resident, 0 on other devices and while idle",
        lambda s: s.stats.ledger.wired,
    ),
    (
        "mlxrunner_allocator_bytes",
        "Memory held by the allocator, including its free buffers",
        lambda s: s.stats.allocated_bytes,
    ),
)

# names without the suffix _total of their samples
COUNTERS: Sequence[MetricRow] = (
    (
        "vllm:prompt_tokens",
        "Prompt tokens computed (again after a preemption) or found in the prefix cache, "
        "updated during prefill",
        lambda s: s.stats.prefilled_tokens + s.stats.cached_tokens,
    ),
    ("vllm:generation_tokens", "Generated tokens", lambda s: s.stats.generated_tokens),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        lambda s: s.stats.prefix_query_tokens,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        lambda s: s.stats.cached_tokens,
    ),
    (
        "vllm:num_preemptions",
        "Requests preempted for lack of KV cache memory",
        lambda s: s.stats.preemptions,
    ),
    (
        "mlxrunner_embedded_tokens",
        "Input tokens of embedding requests",
        lambda s: s.stats.embedded_tokens,
    ),
    (
        "mlxrunner_images_encoded",
        "Images that the vision tower has encoded",
        lambda s: s.stats.images_encoded,
    ),
    (
        "mlxrunner_image_cache_hits",
        "Images whose features were cached when a request needed them",
        lambda s: s.stats.image_cache_hits,
    ),
    ("mlxrunner_engine_steps", "Steps of the engine loop", lambda s: s.stats.steps),
    (
        "mlxrunner_engine_failures",
        "Jobs that failed while the engine continued to run",
        lambda s: s.stats.failures,
    ),
    (
        "mlxrunner_prefix_cache_evictions",
        "Cached prefixes evicted to free memory",
        lambda s: s.stats.prefix_evictions,
    ),
    (
        "mlxrunner_model_loads",
        "Number of model loads",
        lambda s: s.loads,
    ),
    (
        "mlxrunner_model_evictions",
        "Number of times the model was evicted to make room for another model",
        lambda s: s.evictions,
    ),
    (
        "mlxrunner_model_restarts",
        "Number of restarts of the model's runner",
        lambda s: s.restarts,
    ),
)


class EngineCollector(Collector):
    """Exports the state of every model. The counters never decrease: `ModelState.stats` is carried
    over when a model's engine is replaced."""

    def __init__(self) -> None:
        self._server_state: RunnerState = "loading"
        self._states: Sequence[ModelState] = ()

    def refresh(self, models: Models) -> Sequence[ModelState]:
        """Takes the snapshot for the next scrape. Call this method on the event loop, which owns
        the state."""
        self._server_state, self._states = models.status().state, models.list_model_states()
        return self._states

    def describe(self) -> Iterator[Metric]:
        """Returns nothing, so that registration does not call `collect` before the first
        snapshot."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics. May be called on any thread."""
        now, states = self._server_state, self._states
        gauge = GaugeMetricFamily(
            "mlxrunner_state", "1 for the current state of the server", labels=["state"]
        )
        for name in _SERVER_STATES:
            gauge.add_metric([name], name == now)
        yield gauge
        yield _labeled_gauge(
            "mlxrunner_model_state",
            "1 for the current state of the model",
            "state",
            states,
            _phase_flags,
        )
        for name, text, value in GAUGES:
            yield _add_samples(GaugeMetricFamily(name, text, labels=LABELS), states, value)
        for name, text, value in COUNTERS:
            yield _add_samples(CounterMetricFamily(name, text, labels=LABELS), states, value)
        yield _labeled_gauge(
            "mlxrunner_memory_bytes",
            "The engine's memory budget by use; the sum is mlxrunner_memory_budget_bytes",
            "line",
            states,
            _ledger_values,
        )
        yield from _prefix_cache_metrics(states)


def _phase_flags(state: ModelState) -> Mapping[str, float]:
    return {phase: phase == state.phase for phase in _PHASES}


def _ledger_values(state: ModelState) -> Mapping[str, float]:
    ledger = state.stats.ledger
    return {
        "weights": ledger.weights,
        "kv": ledger.kv,
        "prefix": ledger.prefix,
        "working": ledger.working,
        "free": ledger.free,
    }


def _prefix_cache_metrics(states: Iterable[ModelState]) -> Iterator[Metric]:
    bounds = [*(str(float(bound)) for bound in PREFIX_HIT_BUCKETS), "+Inf"]
    hits = HistogramMetricFamily(
        "mlxrunner_prefix_cache_hit_tokens",
        "Prefix cache lookups by number of cached prompt tokens",
        labels=LABELS,
    )
    misses = CounterMetricFamily(
        "mlxrunner_prefix_cache_misses",
        "Prefix cache lookups that missed part of the prompt, by reason",
        labels=[*LABELS, "reason"],
    )
    for state in states:
        labels = [state.name, ENGINE_INDEX]
        buckets = list(
            zip(bounds, map(float, accumulate(state.stats.prefix_hit_counts)), strict=True)
        )
        # the sum of all observations is the number of cached tokens
        hits.add_metric(labels, buckets, sum_value=state.stats.cached_tokens)
        for reason, count in state.stats.prefix_miss_counts:
            misses.add_metric([*labels, reason], count)
    yield hits
    yield misses


def _add_samples(
    family: GaugeMetricFamily | CounterMetricFamily,
    states: Iterable[ModelState],
    value: Callable[[ModelState], float | None],
) -> Metric:
    for state in states:
        if (figure := value(state)) is not None:
            family.add_metric([state.name, ENGINE_INDEX], figure)
    return family


def _labeled_gauge(
    name: str,
    text: str,
    label: str,
    states: Iterable[ModelState],
    values: Callable[[ModelState], Mapping[str, float]],
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[*LABELS, label])
    for state in states:
        for key, value in values(state).items():
            family.add_metric([state.name, ENGINE_INDEX, key], value)
    return family
