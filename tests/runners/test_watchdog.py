"""The watchdog: silence, missing progress, and false alarms."""

from app.core.jobs import IDLE, Heartbeat
from app.runners.process_runner import Stall, Watchdog


def make_watchdog() -> Watchdog:
    return Watchdog(watchdog=4.0, interval=1.0)


def heartbeat(when: int, stage: str = "decode, batch size 8") -> Heartbeat:
    return Heartbeat(timestamp_ns=when, stage=stage)


def feed(watchdog: Watchdog, *beats: Heartbeat) -> list[Stall | None]:
    """The results of a check after each heartbeat."""
    results: list[Stall | None] = []
    for beat in beats:
        watchdog.note_activity()
        watchdog.note_heartbeat(beat)
        results.append(watchdog.check())
    return results


def test_silence_after_the_first_message_is_a_hang():
    watchdog = make_watchdog()
    assert [watchdog.check() for _ in range(100)] == [None] * 100, "nothing has started"
    watchdog.note_activity()
    assert [watchdog.check() for _ in range(4)] == [None] * 4
    assert watchdog.check() == Stall(message="the engine process has sent nothing for 5 s")


def test_any_activity_ends_a_silence():
    watchdog = make_watchdog()
    for _ in range(10):
        watchdog.note_activity()
        assert [watchdog.check() for _ in range(4)] == [None] * 4


def test_a_stage_that_does_not_end_is_a_hang():
    results = feed(make_watchdog(), *[heartbeat(7)] * 6)
    assert results[:4] == [None] * 4
    message = "the engine has made no progress for 4 s (decode, batch size 8)"
    assert results[4] == Stall(message=message, stuck_since_ns=7)


def test_a_stage_that_restarts_is_not_a_hang():
    assert feed(make_watchdog(), *[heartbeat(i) for i in range(20)]) == [None] * 20


def test_a_long_idle_time_is_not_a_hang():
    assert feed(make_watchdog(), *[heartbeat(7, IDLE)] * 20) == [None] * 20


def test_a_delayed_watchdog_reports_no_hang():
    """Heartbeats that arrived meanwhile are processed first, and no clock measures the delay."""
    watchdog = make_watchdog()
    feed(watchdog, heartbeat(1))
    for beat in range(2, 300):
        watchdog.note_activity()
        watchdog.note_heartbeat(heartbeat(beat, IDLE))
    assert watchdog.check() is None
