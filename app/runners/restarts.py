"""When a model that broke is tried again: a pure policy.

Knows: clock readings, how often it broke. Must not know: runners, who waits. A runner that dies
soon after its start is started again ever later, and a model that does not get through its load is
left alone for a while. Then it gets one trial, not three: what broke it is likely still there.
"""

from dataclasses import dataclass, replace

from app.core.errors import AppError

# code of an error that a load ended with though nothing was found to be wrong: it may get through
# the next time
CRASHED = "runner_crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds: first, before the first restart; each one in a row doubles them, up to longest.
    healthy: after which a runner that breaks is the first in a row again. refused: for which a
    model is not tried that broke tries times in a row while it was loaded."""

    first: float = 0.5
    longest: float = 30.0
    healthy: float = 60.0
    tries: int = 3
    refused: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """breaks: in a row, loads included. loads: those that broke, in a row. not_before: reading of
    the clock before which it is not started. error: the last one, until a load succeeds."""

    breaks: int = 0
    loads: int = 0
    not_before: float = 0.0
    error: AppError | None = None

    def refused(self, now: float, patience: Patience) -> bool:
        return self.loads >= patience.tries and now < self.not_before


def after_failed_load(health: Health, now: float, error: AppError, patience: Patience) -> Health:
    breaks, loads = health.breaks + 1, health.loads + 1
    pause = patience.refused if loads >= patience.tries else _backoff(breaks, patience)
    return Health(breaks=breaks, loads=loads, not_before=now + pause, error=error)


def after_load(health: Health) -> Health:
    """Whether it is healthy is not known yet, so the breaks in a row still count."""
    return replace(health, loads=0, error=None)


def after_death(
    health: Health, now: float, lived: float, error: AppError, patience: Patience
) -> Health:
    """lived: seconds for which it was ready."""
    breaks = 1 if lived >= patience.healthy else health.breaks + 1
    return Health(breaks=breaks, not_before=now + _backoff(breaks, patience), error=error)


def _backoff(breaks: int, patience: Patience) -> float:
    # the exponent is bounded: a model may break for weeks
    return min(patience.longest, patience.first * 2.0 ** min(breaks - 1, 32))
