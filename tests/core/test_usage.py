"""Usage per API key: requests, tokens, the quota of a day and the rate."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, ErrorKind
from app.core.events import Event, Finish, PrefillProgress, TextDelta, Timings, Usage
from app.core.request_lifecycle import ObservedGenerate, RequestLimits
from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.core.usage import UsageCounters, UsageLimits
from tests.fakes import FakeGenerate, FakeModel

DAY = 24 * 60 * 60
NOON = 20_000 * DAY + DAY / 2


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


def make_counters(**limits: Any) -> tuple[UsageCounters, Clock]:
    clock = Clock()
    return UsageCounters(lambda _: UsageLimits(**limits), clock), clock


def get_error(counters: UsageCounters, caller: str = "ann") -> AppError:
    with pytest.raises(AppError) as caught:
        counters.admit(caller)
    assert caught.value.kind is ErrorKind.BUSY
    return caught.value


def progress(prompt: int = 0, cached: int = 3, total: int = 10) -> Event:
    return PrefillProgress(prompt_index=prompt, computed_tokens=cached, total_tokens=total)


def finish(choice: int = 0, prompt: int = 0, generated: int = 5) -> Event:
    usage = Usage(prompt_tokens=10, cached_tokens=3, completion_tokens=generated)
    timings = Timings(prefill_ns=1, decode_ns=1, total_ns=2)
    return Finish(choice=choice, prompt_index=prompt, reason="stop", usage=usage, timings=timings)


def text(choice: int = 0) -> Event:
    return TextDelta(choice=choice, text="x")


def count(*events: Event) -> tuple[int, int, int]:
    """The prompt, cached and generated tokens of one request."""
    counters, _ = make_counters()
    request = GenerateRequest(model="fake/model", prompt="hi", caller="ann")
    limits = RequestLimits(Settings(), counters)

    async def run() -> None:
        generate = ObservedGenerate(FakeGenerate(events), limits=limits)
        async with generate.open(request, FakeModel()) as batches:
            async for _ in batches:
                pass

    asyncio.run(run())
    used = counters.get("ann")
    assert used.today_tokens == used.prompt_tokens + used.generated_tokens
    return used.prompt_tokens, used.cached_tokens, used.generated_tokens


def test_a_finished_choice_reports_its_tokens():
    assert count(progress(), progress(cached=10), text(), text(), finish()) == (10, 3, 5)
    assert count(finish()) == (10, 3, 5)


def test_the_choices_of_a_prompt_share_it():
    assert count(progress(), progress(), finish(0), finish(1)) == (10, 3, 10)
    assert count(progress(), progress(1), finish(0), finish(1, prompt=1)) == (20, 6, 10)


def test_a_cancelled_answer_counts_as_far_as_it_came():
    """Otherwise clients could disconnect before the end of each answer, and never use tokens."""
    assert count(progress()) == (10, 3, 0)
    assert count(progress(), text(0), text(1), text(1), finish(0)) == (10, 3, 7)
    assert count() == (0, 0, 0)


def test_the_quota_of_a_day_ends_at_midnight():
    counters, clock = make_counters(daily_tokens=100)
    counters.admit("ann")
    counters.add_tokens("ann", prompt=60, cached=10, generated=39)
    counters.admit("ann")
    counters.add_tokens("ann", prompt=1, cached=0, generated=0)
    error = get_error(counters)
    assert "has used 100 tokens today, and its limit is 100 tokens a day" in error.message
    assert (error.code, error.retry_after) == ("insufficient_quota", DAY / 2)
    counters.admit("bob")
    clock.now += DAY / 2 - 0.5
    assert get_error(counters).retry_after == 1
    clock.now += 0.5
    counters.admit("ann")
    used = counters.get("ann")
    assert (used.requests, used.prompt_tokens, used.today_tokens) == (3, 61, 0)
    assert used.date == "2024-10-05"


def test_the_rate_is_an_average():
    counters, clock = make_counters(requests_per_minute=3)
    for _ in range(3):
        counters.admit("ann")
    error = get_error(counters)
    assert (error.code, error.retry_after) == ("rate_limit_exceeded", 20)
    counters.admit("bob")
    clock.now += 20
    counters.admit("ann")
    assert get_error(counters).retry_after == 20
    clock.now -= 1000  # the system's clock was set
    assert get_error(counters).retry_after == 20


def test_limits_can_change():
    limits = [UsageLimits(requests_per_minute=1)]
    counters = UsageCounters(lambda _: limits[0], Clock())
    counters.admit("ann")
    get_error(counters)
    limits[0] = UsageLimits()
    counters.admit("ann")


@given(
    gaps=st.lists(st.floats(0, 90), min_size=1, max_size=60),
    rate=st.integers(1, 20),
)
def test_no_minute_has_more_than_twice_the_rate(gaps: list[float], rate: int):
    counters, clock = make_counters(requests_per_minute=rate)
    accepted: list[float] = []
    for gap in gaps:
        clock.now += gap
        try:
            counters.admit("ann")
        except AppError as error:
            clock.now += error.retry_after or 0
            counters.admit("ann")  # as promised
        accepted.append(clock.now)
    minutes = Counter(int(at // 60) for at in accepted)
    assert max(minutes.values()) <= 2 * rate
    assert counters.get("ann").requests == len(gaps)
