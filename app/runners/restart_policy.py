"""The restart policy for failed models, and the grace period before a process is killed, as pure
functions.

Knows: clock readings, the number of failures, bytes. Must not know: runners, waiting requests.

A runner that fails soon after its start is restarted with exponential backoff. A model that fails
to load repeatedly is refused for a while. After that, a single failed load causes the model to be
refused again, because the cause is likely to persist.
"""

from dataclasses import dataclass, replace

from app.core.errors import AppError
from app.core.jobs import Capacity, Ledger

# The error code of a failed load without a known error in the model files. The next load may
# succeed.
RUNNER_CRASHED = "runner_crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The delays and limits of the policy. All durations are in seconds.

    initial_delay: the delay before the first restart, doubled for each consecutive failure up to
        max_delay.
    healthy_after: the uptime after which the count of consecutive failures is reset.
    max_load_failures: the number of consecutive failed loads after which the model is refused.
    refuse_for: the time for which the model is refused.
    """

    initial_delay: float = 0.5
    max_delay: float = 30.0
    healthy_after: float = 60.0
    max_load_failures: int = 3
    refuse_for: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartState:
    """The failures of one model.

    failures: the number of consecutive failures, including failed loads.
    load_failures: the number of consecutive failed loads.
    not_before: the time before which the model is not loaded.
    error: the last error; None after a successful load.
    """

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
    """Returns the state after a successful load. `failures` is not reset, because the runner may
    still fail soon."""
    return replace(state, load_failures=0, error=None)


def after_crash(
    state: RestartState, now: float, uptime: float, error: AppError, policy: RestartPolicy
) -> RestartState:
    """Returns the state after a crash of a ready runner. `uptime` is the time in seconds that the
    runner was ready."""
    breaks = 1 if uptime >= policy.healthy_after else state.failures + 1
    return RestartState(
        failures=breaks, not_before=now + _backoff_delay(breaks, policy), error=error
    )


def _backoff_delay(failures: int, policy: RestartPolicy) -> float:
    # The exponent is bounded, because a model may fail for weeks.
    return min(policy.max_delay, policy.initial_delay * 2.0 ** min(failures - 1, 32))


# The grace period in seconds of a process without and with wired memory, and the number of bytes
# that a process with more memory unwires and frees per second.
_GRACE, _MIN_WIRED_GRACE, _FREED_BYTES_PER_SECOND = 5.0, 30.0, 4 << 30


def stop_grace(capacity: Capacity | None, ledger: Ledger) -> float:
    """Returns the number of seconds that a model process gets to exit before it is killed.

    capacity: the capacity of its engine; None until the model is loaded, and its memory is wired.
    ledger: its last known ledger.

    macOS may keep the wired memory of a killed process until the machine restarts. A process that
    wires memory therefore gets the time to finish a long step and to free its memory.
    """
    wirable = 0 if capacity is None else capacity.wirable
    if wirable == 0:
        return _GRACE
    return max(_MIN_WIRED_GRACE, min(wirable, ledger.in_use) / _FREED_BYTES_PER_SECOND)
