"""The metrics of llama.cpp's server, for its dashboards: totals of all models, without labels.

Knows: llama.cpp's names and meanings (tools/server/server-context.cpp of 2026-08). Must not know:
the counting of statistics.

They are written here because prometheus_client adds _total to the name of each counter, which
`n_tokens_max` does not have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from app.core.models import ModelState


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTimes:
    """prefill, decode: the seconds of all finished choices. max_tokens: the number of tokens of the
    longest one, including its prompt."""

    prefill: float
    decode: float
    max_tokens: int


class LlamaCppMetrics:
    """Renders the metrics. The rates are averages since the last scrape, as in llama.cpp."""

    def __init__(self) -> None:
        self._last: Mapping[str, float] = {}

    def render(self, states: Sequence[ModelState], times: GenerationTimes) -> str:
        """Returns the text of the families, in Prometheus's text format."""
        counters = _count(states, times)
        rates = {
            "prompt_tokens_seconds": self._rate(counters, "prompt_tokens", "prompt_seconds"),
            "predicted_tokens_seconds": self._rate(
                counters, "tokens_predicted", "tokens_predicted_seconds"
            ),
        }
        self._last = counters
        values = {**counters, **rates, **_gauge(states)}
        return "".join(
            _write_family(name, kind, text, values[name]) for name, kind, text in _FAMILIES
        )

    def _rate(self, counters: Mapping[str, float], tokens: str, seconds: str) -> float:
        count, time = (
            counters[name] - self._last.get(name, 0.0)
            for name in (f"{tokens}_total", f"{seconds}_total")
        )
        return count / time if time > 0 else 0.0


def _count(states: Sequence[ModelState], times: GenerationTimes) -> Mapping[str, float]:
    stats = [state.stats for state in states]
    return {
        "prompt_tokens_total": sum(one.prefilled_tokens + one.embedded_tokens for one in stats),
        "prompt_tokens_cached_total": sum(one.cached_tokens for one in stats),
        "prompt_seconds_total": times.prefill,
        "tokens_predicted_total": sum(one.generated_tokens for one in stats),
        "tokens_predicted_seconds_total": times.decode,
        "n_decode_total": sum(one.steps for one in stats),
        "n_tokens_max": times.max_tokens,
        **dict.fromkeys(_DRAFT_COUNTERS, 0),
    }


def _gauge(states: Sequence[ModelState]) -> Mapping[str, float]:
    steps = sum(state.stats.steps for state in states)
    generated = sum(state.stats.generated_tokens for state in states)
    return {
        "requests_processing": sum(state.stats.running for state in states),
        "requests_deferred": sum(
            state.stats.waiting + state.preparing + state.compiling for state in states
        ),
        "n_busy_slots_per_decode": generated / steps if steps else 0.0,
    }


def _write_family(name: str, kind: str, text: str, value: float) -> str:
    full = f"llamacpp:{name}"
    return f"# HELP {full} {text}\n# TYPE {full} {kind}\n{full} {float(value)}\n"


# there are no draft models
_DRAFT_COUNTERS = (
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_drafts_total",
)

_Kind = Literal["counter", "gauge"]
_FAMILIES: Sequence[tuple[str, _Kind, str]] = (
    ("prompt_tokens_total", "counter", "Prompt and embedding tokens computed"),
    ("prompt_tokens_cached_total", "counter", "Prompt tokens found in the prefix cache"),
    ("prompt_seconds_total", "counter", "Prefill time of finished choices"),
    ("tokens_predicted_total", "counter", "Generated tokens"),
    ("tokens_predicted_seconds_total", "counter", "Decode time of finished choices"),
    ("n_decode_total", "counter", "Steps of the engine loop"),
    ("n_tokens_max", "counter", "Tokens of the longest finished choice, including its prompt"),
    *((name, "counter", "Always 0: there are no draft models") for name in _DRAFT_COUNTERS),
    ("prompt_tokens_seconds", "gauge", "Prefill tokens per second since the last scrape"),
    ("predicted_tokens_seconds", "gauge", "Generated tokens per second since the last scrape"),
    ("requests_processing", "gauge", "Requests running in the engine"),
    ("requests_deferred", "gauge", "Requests waiting for the engine"),
    ("n_busy_slots_per_decode", "gauge", "Mean number of tokens generated per engine step"),
)
