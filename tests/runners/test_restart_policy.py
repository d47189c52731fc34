"""When a model that broke is tried again."""

from app.core.errors import AppError, ErrorKind
from app.runners.restart_policy import (
    RestartPolicy,
    RestartState,
    after_crash,
    after_failed_load,
    after_load,
)

PATIENCE = RestartPolicy()
ERROR = AppError(ErrorKind.ENGINE, "it broke")


def test_pauses_double_from_half_a_second_to_half_a_minute():
    health, pauses = RestartState(), list[float]()
    for _ in range(9):
        health = after_crash(after_load(health), 100.0, 1.0, ERROR, PATIENCE)
        pauses.append(health.not_before - 100.0)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_model_that_breaks_for_weeks_is_still_tried():
    health = after_crash(RestartState(failures=10**6), 0.0, 1.0, ERROR, PATIENCE)
    assert health.not_before == 30.0


def test_a_minute_of_health_begins_anew():
    health = after_crash(RestartState(failures=5), 0.0, 60.0, ERROR, PATIENCE)
    assert health.not_before == 0.5


def test_three_loads_that_fail_in_a_row_are_refused_for_a_minute_and_then_there_is_one_trial():
    health = RestartState()
    for pause in (0.5, 1.0, 60.0):
        assert not health.is_refused(0.0, PATIENCE)
        health = after_failed_load(health, 0.0, ERROR, PATIENCE)
        assert health.not_before == pause
    assert health.is_refused(59.0, PATIENCE)
    assert not health.is_refused(60.0, PATIENCE)
    health = after_failed_load(health, 60.0, ERROR, PATIENCE)
    assert health.is_refused(119.0, PATIENCE)
    assert health.error is ERROR


def test_a_load_that_succeeds_ends_the_row_of_failed_ones():
    health = after_failed_load(RestartState(load_failures=2), 0.0, ERROR, PATIENCE)
    health = after_load(health)
    assert (health.load_failures, health.error) == (0, None)
