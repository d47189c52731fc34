"""Usage and timings at the end of an answer."""

import pytest

from app.api.openai.output import UsageTotals, render_usage
from app.core.events import Finish, Timings, Usage


def end(
    *, prompt: int = 0, tokens: int = 2, cached: int = 3, reasoning: int = 0, factor: int = 1
) -> Finish:
    return Finish(
        prompt_index=prompt,
        reason="stop",
        usage=Usage(
            prompt_tokens=7,
            completion_tokens=tokens,
            cached_tokens=cached,
            reasoning_tokens=reasoning,
        ),
        timings=Timings(
            prefill_ns=2_000_000 * factor,
            decode_ns=30_000_000 * factor,
            total_ns=35_000_000 * factor,
        ),
    )


def usage_totals(*ends: Finish) -> UsageTotals:
    totals = UsageTotals()
    for finish in ends:
        totals.add(finish)
    return totals


def test_usage_of_one_choice():
    assert render_usage(usage_totals(end(tokens=20, reasoning=15)).usage) == {
        "prompt_tokens": 7,
        "completion_tokens": 20,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 15},
    }


def test_a_prompt_is_counted_once_and_every_choice():
    totals = usage_totals(end(tokens=2, cached=6), end(tokens=5, cached=0, reasoning=4))
    assert totals.usage == Usage(
        prompt_tokens=7, completion_tokens=7, cached_tokens=0, reasoning_tokens=4
    )
    more = usage_totals(end(), end(), end(prompt=1, cached=1))
    assert more.usage == Usage(prompt_tokens=14, completion_tokens=6, cached_tokens=4)


def test_timings_of_parallel_choices_are_the_maximum():
    assert usage_totals(end(factor=3), end(factor=1)).timings == end(factor=3).timings


def test_timings_have_the_fields_of_llama_cpp():
    counters = usage_totals(end(tokens=16)).render_counters()
    assert counters == {
        "prompt_eval_count": 7,
        "prompt_eval_duration": 2_000_000,
        "eval_count": 16,
        "eval_duration": 32_000_000,
        "total_duration": 35_000_000,
        "timings": {
            "cache_n": 3,
            "prompt_n": 4,
            "prompt_ms": 2.0,
            "prompt_per_token_ms": 0.5,
            "prompt_per_second": 2000.0,
            "predicted_n": 16,
            "predicted_ms": 30.0,
            "predicted_per_token_ms": 2.0,
            "predicted_per_second": 500.0,
        },
    }


@pytest.mark.parametrize("tokens", [0, 1])
def test_zero_durations_give_zero_rates(tokens: int):
    timings = usage_totals(end(tokens=tokens, cached=7, factor=0)).render_counters()["timings"]
    assert timings["prompt_per_token_ms"] == timings["prompt_per_second"] == 0.0
    assert timings["predicted_per_token_ms"] == timings["predicted_per_second"] == 0.0


def test_the_first_token_takes_no_step_of_decoding():
    """One token in 10 µs of decoding was 93,914 tokens per second."""
    counters = usage_totals(end(tokens=1)).render_counters()
    assert counters["timings"]["predicted_per_second"] == 0.0
    assert counters["timings"]["predicted_per_token_ms"] == 0.0
    assert counters["eval_duration"] == counters["prompt_eval_duration"]


def test_each_choice_has_a_first_token():
    counters = usage_totals(end(tokens=4), end(tokens=5), end(tokens=0)).render_counters()
    assert counters["timings"]["predicted_per_second"] == pytest.approx(7 / 0.03)
    assert counters["eval_count"] * 1e9 / counters["eval_duration"] == pytest.approx(7 / 0.03)
