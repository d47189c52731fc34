"""When a model that broke is tried again."""

from app.core.errors import AppError, Kind
from app.runners.restarts import Health, Patience, after_death, after_failed_load, after_load

PATIENCE = Patience()
ERROR = AppError(Kind.ENGINE, "it broke")


def test_pauses_double_from_half_a_second_to_half_a_minute():
    health, pauses = Health(), list[float]()
    for _ in range(9):
        health = after_death(after_load(health), 100.0, 1.0, ERROR, PATIENCE)
        pauses.append(health.not_before - 100.0)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_model_that_breaks_for_weeks_is_still_tried():
    health = after_death(Health(breaks=10**6), 0.0, 1.0, ERROR, PATIENCE)
    assert health.not_before == 30.0


def test_a_minute_of_health_begins_anew():
    health = after_death(Health(breaks=5), 0.0, 60.0, ERROR, PATIENCE)
    assert health.not_before == 0.5


def test_three_loads_that_fail_in_a_row_are_refused_for_a_minute_and_then_there_is_one_trial():
    health = Health()
    for pause in (0.5, 1.0, 60.0):
        assert not health.refused(0.0, PATIENCE)
        health = after_failed_load(health, 0.0, ERROR, PATIENCE)
        assert health.not_before == pause
    assert health.refused(59.0, PATIENCE)
    assert not health.refused(60.0, PATIENCE)
    health = after_failed_load(health, 60.0, ERROR, PATIENCE)
    assert health.refused(119.0, PATIENCE)
    assert health.error is ERROR


def test_a_load_that_succeeds_ends_the_row_of_failed_ones():
    health = after_failed_load(Health(loads=2), 0.0, ERROR, PATIENCE)
    health = after_load(health)
    assert (health.loads, health.error) == (0, None)
