"""Usage per API key since the start of the server, and the limits of a key on it.

Knows: requests, tokens, the clock. Must not know: HTTP, how keys are stored, models. All code runs
on the event loop, except `snapshot`.

A caller is the name of an API key, as in `GenerateRequest.caller`. The tokens of a day are counted
from midnight UTC, and those of earlier servers may be restored.
"""

import datetime
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from app.core.errors import AppError, ErrorKind
from app.core.events import Event, Finish, PrefillProgress

_DAY = 24 * 60 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLimits:
    """The limits of a caller; None means no limit. daily_tokens: the number of prompt and generated
    tokens per day (UTC). requests_per_minute: the average rate; a minute's worth may arrive at
    once."""

    daily_tokens: int | None = None
    requests_per_minute: int | None = None


NO_LIMITS = UsageLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerUsage:
    """The usage of a caller. prompt_tokens: including the cached ones. today_tokens: prompt and
    generated tokens of `day`, the number of days since 1970-01-01 UTC."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    day: int = 0
    today_tokens: int = 0

    @property
    def date(self) -> str:
        return (datetime.date(1970, 1, 1) + datetime.timedelta(days=self.day)).isoformat()


@dataclass(frozen=True, slots=True, kw_only=True)
class DailyTokens:
    """The prompt and generated tokens of one day, the number of days since 1970-01-01 UTC."""

    day: int
    tokens: int


class UsageCounters:
    """Counts the usage of each caller. get_limits: returns the current limits of a caller. clock:
    the Unix time in seconds."""

    def __init__(
        self,
        get_limits: Callable[[str], UsageLimits] = lambda _: NO_LIMITS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._get_limits = get_limits
        self._clock = clock
        self._callers: dict[str, CallerUsage] = {}
        # The number of requests that a caller may send now, and the time of that number.
        self._allowances: dict[str, tuple[float, float]] = {}

    def get(self, caller: str) -> CallerUsage:
        """Returns the usage of a caller, with the tokens of the current day."""
        today = int(self._clock() // _DAY)
        known = self._callers.get(caller) or CallerUsage(day=today)
        return known if known.day == today else replace(known, day=today, today_tokens=0)

    def get_limits(self, caller: str) -> UsageLimits:
        return self._get_limits(caller)

    def snapshot(self) -> Mapping[str, CallerUsage]:
        """Returns the usage of all callers that have sent a request. Thread-safe."""
        return self._callers.copy()

    def get_daily_tokens(self) -> Mapping[str, DailyTokens]:
        """Returns the tokens of the current day by caller, without callers that have none."""
        today = int(self._clock() // _DAY)
        return {
            caller: DailyTokens(day=today, tokens=used.today_tokens)
            for caller, used in self._callers.items()
            if used.day == today and used.today_tokens
        }

    def restore_daily_tokens(self, known: Mapping[str, DailyTokens]) -> None:
        """Adds the tokens of an earlier server. Tokens of another day do not count any more."""
        for caller, earlier in known.items():
            used = self.get(caller)
            if used.day == earlier.day:
                self._callers[caller] = replace(
                    used, today_tokens=used.today_tokens + earlier.tokens
                )

    def admit(self, caller: str) -> None:
        """Counts a request. Raises AppError(BUSY) if the caller has used up its tokens or sends
        requests too fast."""
        limits, used, now = self._get_limits(caller), self.get(caller), self._clock()
        if limits.daily_tokens is not None and used.today_tokens >= limits.daily_tokens:
            raise AppError(
                ErrorKind.BUSY,
                f"this API key has used {used.today_tokens:,} tokens today, and its limit is "
                f"{limits.daily_tokens:,} tokens a day: try again after midnight UTC, or ask the "
                "operator for a higher limit",
                code="insufficient_quota",
                retry_after=max(1, math.ceil((used.day + 1) * _DAY - now)),
            )
        self._take_allowance(caller, limits.requests_per_minute, now)
        self._add(caller, requests=1)

    def count(self, caller: str) -> "RequestUsage":
        """Returns the counter for the tokens of one request."""
        return RequestUsage(self, caller)

    def add_tokens(self, caller: str, *, prompt: int, cached: int, generated: int) -> None:
        self._add(caller, prompt=prompt, cached=cached, generated=generated)

    def _take_allowance(self, caller: str, per_minute: int | None, now: float) -> None:
        """Takes one request from a token bucket, which is refilled within a minute."""
        if per_minute is None:
            return
        left, since = self._allowances.get(caller, (float(per_minute), now))
        left = min(per_minute, left + max(0.0, now - since) * per_minute / 60)
        if left < 1:
            raise AppError(
                ErrorKind.BUSY,
                f"this API key may send {per_minute:,} requests per minute: wait before the next "
                "one, or ask the operator for a higher limit",
                code="rate_limit_exceeded",
                retry_after=max(1, math.ceil((1 - left) * 60 / per_minute)),
            )
        self._allowances[caller] = (left - 1, now)

    def _add(
        self,
        caller: str,
        *,
        requests: int = 0,
        prompt: int = 0,
        cached: int = 0,
        generated: int = 0,
    ) -> None:
        used = self.get(caller)
        self._callers[caller] = CallerUsage(
            requests=used.requests + requests,
            prompt_tokens=used.prompt_tokens + prompt,
            cached_tokens=used.cached_tokens + cached,
            generated_tokens=used.generated_tokens + generated,
            day=used.day,
            today_tokens=used.today_tokens + prompt + generated,
        )


class RequestUsage:
    """Counts the tokens of one request. A finished choice reports its tokens."""

    def __init__(self, counters: UsageCounters, caller: str) -> None:
        self._counters = counters
        self._caller = caller
        self._known_prompts: set[int] = set()

    def on_event(self, event: Event) -> None:
        """Counts the tokens that an event other than a delta reports."""
        match event:
            case PrefillProgress():
                self._count_prompt(event.prompt_index, event.total_tokens, event.computed_tokens)
            case Finish():
                usage = event.usage
                self._count_prompt(event.prompt_index, usage.prompt_tokens, usage.cached_tokens)
                self.add_generated(usage.completion_tokens)
            case _:
                pass

    def add_prompt(self, tokens: int, *, cached: int = 0) -> None:
        self._counters.add_tokens(self._caller, prompt=tokens, cached=cached, generated=0)

    def add_generated(self, tokens: int) -> None:
        if tokens:
            self._counters.add_tokens(self._caller, prompt=0, cached=0, generated=tokens)

    def _count_prompt(self, index: int, tokens: int, cached: int) -> None:
        """Counts a prompt once, although each of its choices reports it. The first progress of a
        prompt is the number of cached tokens."""
        if index not in self._known_prompts:
            self._known_prompts.add(index)
            self.add_prompt(tokens, cached=cached)
