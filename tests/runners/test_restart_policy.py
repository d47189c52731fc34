"""The delay before a crashed model is restarted."""

from app.core.errors import AppError, ErrorKind
from app.runners.restart_policy import (
    RestartPolicy,
    RestartState,
    after_crash,
    after_failed_load,
    after_load,
)

POLICY = RestartPolicy()
ERROR = AppError(ErrorKind.ENGINE, "it broke")


def test_delays_double_from_half_a_second_to_half_a_minute():
    state, delays = RestartState(), list[float]()
    for _ in range(9):
        state = after_crash(after_load(state), 100.0, 1.0, ERROR, POLICY)
        delays.append(state.not_before - 100.0)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_model_that_crashes_for_weeks_is_still_restarted():
    state = after_crash(RestartState(failures=10**6), 0.0, 1.0, ERROR, POLICY)
    assert state.not_before == 30.0


def test_a_minute_without_a_crash_resets_the_delay():
    state = after_crash(RestartState(failures=5), 0.0, 60.0, ERROR, POLICY)
    assert state.not_before == 0.5


def test_after_three_failed_loads_a_model_is_refused_for_a_minute_before_a_retry():
    state = RestartState()
    for delay in (0.5, 1.0, 60.0):
        assert not state.is_refused(0.0, POLICY)
        state = after_failed_load(state, 0.0, ERROR, POLICY)
        assert state.not_before == delay
    assert state.is_refused(59.0, POLICY)
    assert not state.is_refused(60.0, POLICY)
    state = after_failed_load(state, 60.0, ERROR, POLICY)
    assert state.is_refused(119.0, POLICY)
    assert state.error is ERROR


def test_a_successful_load_resets_the_count_of_failed_ones():
    state = after_failed_load(RestartState(load_failures=2), 0.0, ERROR, POLICY)
    state = after_load(state)
    assert (state.load_failures, state.error) == (0, None)
