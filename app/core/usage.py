"""The statistics of a server: usage per API key, and the limits of a key on it; connections and
responses; the latency of the event loop.

Knows: requests, tokens, the clock, the names of the statistics. Must not know: sockets, HTTP,
metrics, how keys are stored, models. All code runs on the event loop, except `snapshot`.

A caller is the name of an API key, as in `GenerateRequest.caller`. The tokens of a day are counted
from midnight UTC, or from the start of a server that keeps no usage file
(app/serving/usage_file.py). Connection statistics are updated by app/http/connection_limits.py and
app/http/connection.py, response statistics by app/http/request_id.py, and the latency by
app/observability/event_loop_watchdog.py.
"""

import datetime
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from app.core.errors import AppError, ErrorKind
from app.core.events import Event, Finish, PrefillProgress

_DAY = 24 * 60 * 60

# Upper bounds of the histogram, in seconds; the last bucket has no upper bound.
LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# The number of measurements that `worst` covers, equal to one minute.
_WINDOW = 1200

# Reasons why the server closes a connection before the client has received the whole response.
CloseReason = Literal[
    "head_timeout",
    "body_timeout",
    "unread_answer",
    "too_many_connections",
    "head_too_large",
    "invalid_http",
]
CLOSE_REASONS: Sequence[CloseReason] = get_args(CloseReason)

# The method, the route template and the status class (2xx) of a response.
ResponseKey = tuple[str, str, str]


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
        """Adds the tokens of an earlier server. Tokens of earlier days no longer count."""
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


class EventLoopLag:
    """A histogram of the event loop's lag, updated by one task on the event loop. bucket_counts:
    the number of measurements per bucket. sum_seconds: the sum of all measurements in seconds."""

    def __init__(self) -> None:
        self.bucket_counts = [0] * (len(LAG_BUCKETS) + 1)
        self.sum_seconds = 0.0
        self._recent: deque[float] = deque([0.0], maxlen=_WINDOW)

    def observe(self, seconds: float) -> None:
        self.bucket_counts[bisect_left(LAG_BUCKETS, seconds)] += 1
        self.sum_seconds += seconds
        self._recent.append(seconds)

    @property
    def latest(self) -> float:
        return self._recent[-1]

    @property
    def worst(self) -> float:
        """The maximum lag in the last minute, or since the first measurement."""
        return max(self._recent)


@dataclass(slots=True)
class ConnectionStats:
    """Counters of connections and responses. open_connections: sockets that are currently open, in
    any state. shutting_down: whether the server is stopping. accepted_connections: connections
    accepted since startup. closed_by_reason: connections that the server closed, by reason.
    responses: responses sent. ignored_fields: unknown request fields that were ignored, by route
    template."""

    open_connections: int = 0
    shutting_down: bool = False
    accepted_connections: int = 0
    closed_by_reason: dict[CloseReason, int] = field(
        default_factory=lambda: dict.fromkeys(CLOSE_REASONS, 0)
    )
    responses: dict[ResponseKey, int] = field(default_factory=dict[ResponseKey, int])
    ignored_fields: dict[str, int] = field(default_factory=dict[str, int])

    def count_response(self, method: str, route: str, status: int) -> None:
        """Counts a response. method, route: must belong to a known route, so that the number of
        keys is bounded. status: an HTTP status from 100 to 599."""
        key = (method, route, f"{status // 100}xx")
        self.responses[key] = self.responses.get(key, 0) + 1

    def count_ignored_fields(self, route: str, count: int) -> None:
        """Counts the ignored fields of a request. route: as in `count_response`."""
        self.ignored_fields[route] = self.ignored_fields.get(route, 0) + count
