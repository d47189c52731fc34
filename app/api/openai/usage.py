"""Token counts and timings at the end of OpenAI's responses, over all choices.

Knows: OpenAI's `usage`, Ollama's counters, llama.cpp's `timings`. Must not know: the generated
output. Ollama's durations are in nanoseconds. llama.cpp's are in milliseconds (its server's
README.md, "Timings").
"""

from app.core.events import Finish, Timings, Usage
from app.http.responses import JsonObject


class UsageTotals:
    """Sums over the choices that have finished.

    A prompt counts once, however many choices continue it. Its number of cached tokens is that of
    the choice with the fewest cache hits, because the other choices reuse the prefix that this
    choice computed. Choices run in parallel, so the total time is the maximum of their times.
    """

    def __init__(self) -> None:
        self.finished = 0
        self._prompts: dict[int, Usage] = {}
        self._completion = self._reasoning = 0
        self._prompt_ns = self._eval_ns = self._total_ns = 0

    def add(self, finish: Finish) -> None:
        self.finished += 1
        usage, timings = finish.usage, finish.timings
        known = self._prompts.setdefault(finish.prompt_index, usage)
        if usage.cached_tokens < known.cached_tokens:
            self._prompts[finish.prompt_index] = usage
        self._completion += usage.completion_tokens
        self._reasoning += usage.reasoning_tokens
        self._prompt_ns = max(self._prompt_ns, timings.prefill_ns)
        self._eval_ns = max(self._eval_ns, timings.decode_ns)
        self._total_ns = max(self._total_ns, timings.total_ns)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in self._prompts.values()),
            completion_tokens=self._completion,
            cached_tokens=sum(usage.cached_tokens for usage in self._prompts.values()),
            reasoning_tokens=self._reasoning,
        )

    @property
    def timings(self) -> Timings:
        return Timings(prefill_ns=self._prompt_ns, decode_ns=self._eval_ns, total_ns=self._total_ns)

    def render_counters(self) -> JsonObject:
        """Returns the counters that extend OpenAI's usage."""
        usage, timings = self.usage, self.timings
        return {
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": timings.prefill_ns,
            "eval_count": usage.completion_tokens,
            "eval_duration": timings.decode_ns,
            "total_duration": timings.total_ns,
            "timings": _render_timings(usage, timings),
        }


def render_usage(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _render_timings(usage: Usage, timings: Timings) -> JsonObject:
    return {
        "cache_n": usage.cached_tokens,
        **_rate_fields("prompt", usage.prompt_tokens - usage.cached_tokens, timings.prefill_ns),
        **_rate_fields("predicted", usage.completion_tokens, timings.decode_ns),
    }


def _rate_fields(name: str, count: int, nanoseconds: int) -> JsonObject:
    """Returns the count and the rate. The rate is 0 if the count or the time is 0, because JSON has
    no infinity."""
    return {
        f"{name}_n": count,
        f"{name}_ms": nanoseconds / 1e6,
        f"{name}_per_token_ms": nanoseconds / 1e6 / count if count else 0.0,
        f"{name}_per_second": count * 1e9 / nanoseconds if nanoseconds else 0.0,
    }
