"""The definitions of the metrics. Names and definitions follow vLLM's `vllm bench serve`.

Knows: the records of requests, percentiles, service level objectives. Must not know: HTTP, how
requests arrive, formats of reports.

docs/benchmarks.md lists the definitions and the differences from vLLM.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from app.bench.client import RequestRecord

_MS = 1000

# the values of metrics by name; None if there was nothing to measure
Values = Mapping[str, float | None]

# the metrics that are added up over rounds; of all others, a report has the median
_TOTALS = frozenset(
    {
        "completed",
        "failed",
        "cancelled",
        "ended_early",
        "total_input_tokens",
        "total_output_tokens",
        "total_cached_tokens",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """All requests of one load. duration: seconds from the start to the end of the last request.
    cancelled: requests that were running when the load was interrupted. cpu_seconds: the CPU time
    of this process. lag: the delays of the event loop of this process, in seconds."""

    requests: Sequence[RequestRecord]
    duration: float
    cancelled: int = 0
    cpu_seconds: float = 0.0
    lag: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricOptions:
    """percentiles: the percentiles to compute for each latency, from 0 to 100. goodput: the longest
    latency in seconds of a good request, by name; empty to measure no goodput."""

    percentiles: tuple[float, ...] = (50, 90, 99)
    goodput: Mapping[str, float] = field(default_factory=dict[str, float])


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolates linearly between the two nearest ranks, like numpy and vLLM."""
    ranked = sorted(values)
    rank = (len(ranked) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (rank - low)


def compute_metrics(load: LoadRecord, options: MetricOptions) -> dict[str, float | None]:
    """Returns the values of all metrics. Failed requests count only as failed."""
    completed = [record for record in load.requests if record.error is None]
    output = sum(record.output_tokens for record in completed)
    prompts = [r.prompt_tokens for r in completed if r.prompt_tokens is not None]
    cached = [r.cached_tokens for r in completed if r.cached_tokens is not None]
    chunks = sum(len(record.arrivals) for record in completed)
    values: dict[str, float | None] = {
        "completed": len(completed),
        "failed": len(load.requests) - len(completed),
        "cancelled": load.cancelled,
        "ended_early": sum(record.finish_reason == "stop" for record in completed),
        "duration": load.duration,
        "total_input_tokens": sum(prompts) if prompts else None,
        "total_cached_tokens": sum(cached) if cached else None,
        "total_output_tokens": output,
        "request_throughput": _divide(len(completed), load.duration),
        "request_goodput": None,
        "output_throughput": _divide(output, load.duration),
        "total_token_throughput": _divide(output + sum(prompts), load.duration),
        "max_concurrent_requests": _find_peak_concurrency(completed),
        "tokens_per_chunk": _divide(output, chunks),
        "client_cpu_share": _divide(load.cpu_seconds, load.duration),
        "client_lag_p99_ms": _MS * percentile(load.lag, 99) if load.lag else None,
    }
    if options.goodput:
        good = sum(is_good(record, options.goodput) for record in completed)
        values["request_goodput"] = _divide(good, load.duration)
    for name, latencies in _collect_latencies(completed).items():
        values |= _summarize(name, latencies, options.percentiles)
    return values


def is_good(record: RequestRecord, goodput: Mapping[str, float]) -> bool:
    """Whether a request meets all objectives. A missing TPOT is 0, as for a single token in
    vLLM."""
    measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(measured[name] <= limit for name, limit in goodput.items())


def count_errors(requests: Sequence[RequestRecord]) -> dict[str, tuple[int, str]]:
    """Returns the number of failures and the first message by kind, the most frequent first."""
    errors = [record.error for record in requests if record.error is not None]
    messages = {error.kind: error.message for error in reversed(errors)}
    counts = Counter(error.kind for error in errors)
    return {kind: (count, messages[kind]) for kind, count in counts.most_common()}


def combine_rounds(rounds: Sequence[Values]) -> dict[str, float | None]:
    """Returns the median of each metric over the rounds that measured it. Counts are added up."""
    combined: dict[str, float | None] = {}
    for name in dict.fromkeys(name for values in rounds for name in values):
        measured = [value for values in rounds if (value := values.get(name)) is not None]
        if not measured:
            combined[name] = None
        else:
            combined[name] = sum(measured) if name in _TOTALS else statistics.median(measured)
    return combined


def compute_ratios(a: Sequence[Values], b: Sequence[Values]) -> dict[str, float | None]:
    """Returns the median over the rounds of A / B for each metric. The rounds of A and B are pairs
    that ran one after the other, so that drift of the machine affects both."""
    ratios: dict[str, float | None] = {}
    pairs = list(zip(a, b, strict=False))
    for name in dict.fromkeys(name for values in a for name in values):
        if name in _TOTALS:
            continue
        quotients = [_divide(x.get(name), y.get(name)) for x, y in pairs]
        measured = [quotient for quotient in quotients if quotient is not None]
        ratios[name] = statistics.median(measured) if measured else None
    return ratios


def format_percent(percent: float) -> str:
    """Formats a percentile as in the names of metrics: 99, 99.9."""
    return f"{percent:g}"


def _collect_latencies(completed: Sequence[RequestRecord]) -> dict[str, list[float]]:
    return {
        "ttft": [record.ttft for record in completed],
        "tpot": [record.tpot for record in completed if record.tpot is not None],
        "itl": [gap for record in completed for gap in record.itl],
        "e2el": [record.latency for record in completed],
    }


def _summarize(
    name: str, seconds: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float | None]:
    labels = {f"p{format_percent(percent)}_{name}_ms": percent for percent in percentiles}
    if not seconds:
        return dict.fromkeys([f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *labels])
    return {
        f"mean_{name}_ms": _MS * statistics.fmean(seconds),
        f"median_{name}_ms": _MS * statistics.median(seconds),
        f"std_{name}_ms": _MS * statistics.pstdev(seconds),
        **{label: _MS * percentile(seconds, percent) for label, percent in labels.items()},
    }


def _find_peak_concurrency(completed: Sequence[RequestRecord]) -> int:
    """The largest number of requests at the same time. A request that ends when another one starts
    does not overlap with it."""
    events = [(record.sent, 1) for record in completed]
    events += [(record.sent + record.latency, -1) for record in completed]
    peak = running = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak


def _divide(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
