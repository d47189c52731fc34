"""When a model that broke is tried again: a pure policy.

Knows: clock readings, how often it broke. Must not know: runners, who waits. A runner that dies
soon after its start is started again ever later, and a model that does not get through its load is
left alone for a while. Then it gets one trial, not three: what broke it is likely still there.
"""

from dataclasses import dataclass, replace

from app.core.errors import AppError

# code of an error that a load ended with though nothing was found to be wrong: it may get through
# the next time
RUNNER_CRASHED = "runner_crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Seconds: first, before the first restart; each one in a row doubles them, up to longest.
    healthy_after: after which a runner that breaks is the first in a row again. refuse_for: for
    which a model is not tried that broke tries times in a row while it was loaded."""

    initial_delay: float = 0.5
    max_delay: float = 30.0
    healthy_after: float = 60.0
    max_load_failures: int = 3
    refuse_for: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartState:
    """failures: in a row, loads included. load_failures: those that broke, in a row. not_before:
    reading of the clock before which it is not started. error: the last one, until a load
    succeeds."""

    failures: int = 0
    load_failures: int = 0
    not_before: float = 0.0
    error: AppError | None = None

    def is_refused(self, now: float, policy: RestartPolicy) -> bool:
        return self.load_failures >= policy.max_load_failures and now < self.not_before


def after_failed_load(
    state: RestartState, now: float, error: AppError, policy: RestartPolicy
) -> RestartState:
    breaks, loads = state.failures + 1, state.load_failures + 1
    pause = (
        policy.refuse_for if loads >= policy.max_load_failures else _backoff_delay(breaks, policy)
    )
    return RestartState(failures=breaks, load_failures=loads, not_before=now + pause, error=error)


def after_load(state: RestartState) -> RestartState:
    """Whether it is healthy is not known yet, so the breaks in a row still count."""
    return replace(state, load_failures=0, error=None)


def after_crash(
    state: RestartState, now: float, uptime: float, error: AppError, policy: RestartPolicy
) -> RestartState:
    """uptime: seconds for which it was ready."""
    breaks = 1 if uptime >= policy.healthy_after else state.failures + 1
    return RestartState(
        failures=breaks, not_before=now + _backoff_delay(breaks, policy), error=error
    )


def _backoff_delay(failures: int, policy: RestartPolicy) -> float:
    # the exponent is bounded: a model may break for weeks
    return min(policy.max_delay, policy.initial_delay * 2.0 ** min(failures - 1, 32))
