"""Silence, standing still, and what only looks like them."""

from app.core.jobs import IDLE, Heartbeat
from app.runners.process_runner import Watchdog


def make_watchdog() -> Watchdog:
    return Watchdog(watchdog=4.0, interval=1.0)


def at(when: int, doing: str = "decode of 8 sequences") -> Heartbeat:
    return Heartbeat(timestamp_ns=when, stage=doing)


def hear(on: Watchdog, *beats: Heartbeat) -> list[str | None]:
    """A look behind each beat."""
    told: list[str | None] = []
    for beat in beats:
        on.note_activity()
        on.note_heartbeat(beat)
        told.append(on.check())
    return told


def test_silence_is_a_hang_once_something_was_heard():
    on = make_watchdog()
    assert [on.check() for _ in range(100)] == [None] * 100, "nothing has begun"
    on.note_activity()
    assert [on.check() for _ in range(4)] == [None] * 4
    assert on.check() == "the engine's process has sent nothing for 5 s"


def test_anything_breaks_a_silence():
    on = make_watchdog()
    for _ in range(10):
        on.note_activity()
        assert [on.check() for _ in range(4)] == [None] * 4


def test_a_stage_that_does_not_end_is_a_hang():
    told = hear(make_watchdog(), *[at(7)] * 6)
    assert told[:4] == [None] * 4
    assert told[4] == "the engine has made no progress for 4 s (decode of 8 sequences)"


def test_a_stage_that_begins_again_and_again_is_none():
    assert hear(make_watchdog(), *[at(i) for i in range(20)]) == [None] * 20


def test_idleness_may_last():
    assert hear(make_watchdog(), *[at(7, IDLE)] * 20) == [None] * 20


def test_a_watcher_that_slept_itself_takes_nothing_for_a_hang():
    """Heartbeats that came meanwhile are heard first, and no clock says how long it was."""
    on = make_watchdog()
    hear(on, at(1))
    for beat in range(2, 300):
        on.note_activity()
        on.note_heartbeat(at(beat, IDLE))
    assert on.check() is None
