"""The watchdog: silence, missing progress, commands that are not taken, and false alarms."""

from app.core.jobs import IDLE, Heartbeat, LoadProgress
from app.runners.process_runner import Stall, Watchdog
from app.runners.worker_protocol import ProbeReply


def make_watchdog(load_timeout: float = 300.0) -> Watchdog:
    return Watchdog(name="m", watchdog=4.0, load_timeout=load_timeout, interval=1.0)


def make_ready_watchdog() -> Watchdog:
    watchdog = make_watchdog()
    watchdog.note_message()
    watchdog.note_ready()
    return watchdog


def heartbeat(when: int, stage: str = "decode, batch size 8") -> Heartbeat:
    return Heartbeat(timestamp_ns=when, stage=stage)


def feed(watchdog: Watchdog, *beats: Heartbeat, takes_commands: bool = True) -> list[Stall | None]:
    """The results of a check after each heartbeat."""
    results: list[Stall | None] = []
    for beat in beats:
        watchdog.note_message()
        watchdog.note_probe_reply(ProbeReply(heartbeat=beat, takes_commands=takes_commands))
        results.append(watchdog.check())
    return results


def count_checks(watchdog: Watchdog) -> tuple[int, str]:
    """The number of checks until the process is considered hung, and the message."""
    for count in range(1, 1000):
        if (stall := watchdog.check()) is not None:
            return count, stall.message
    raise AssertionError("it never is")


def test_silence_is_a_hang():
    hung = 5, "the engine process has sent nothing for 5 s"
    assert count_checks(make_ready_watchdog()) == hung


def test_any_message_ends_a_silence():
    watchdog = make_ready_watchdog()
    for _ in range(10):
        watchdog.note_message()
        assert [watchdog.check() for _ in range(4)] == [None] * 4


def test_a_process_that_has_not_started_gets_more_time_than_a_silent_load():
    watchdog = make_watchdog()
    assert count_checks(watchdog) == (31, "m could not be loaded: no progress for 31 s at 0 %")
    watchdog = make_watchdog()
    watchdog.note_message()
    assert count_checks(watchdog) == (5, "m could not be loaded: no progress for 5 s at 0 %")


def test_a_load_may_take_long_as_long_as_it_makes_progress():
    watchdog = make_watchdog(load_timeout=10.0)
    for percent in range(1, 90):
        assert feed(watchdog, *[heartbeat(1)] * 9, takes_commands=False) == [None] * 9
        watchdog.note_load_progress(LoadProgress(progress=percent, allocated_bytes=0))
    for _ in range(9):
        watchdog.note_load_progress(LoadProgress(progress=89, allocated_bytes=0))
        assert feed(watchdog, heartbeat(1)) == [None]
    [stall] = feed(watchdog, heartbeat(1))
    assert stall == Stall(message="m could not be loaded: no progress for 10 s at 89 %")


def test_a_stage_that_does_not_end_is_a_hang():
    results = feed(make_ready_watchdog(), *[heartbeat(7)] * 6)
    assert results[:4] == [None] * 4
    message = "the engine has made no progress for 4 s (decode, batch size 8)"
    assert results[4] == Stall(message=message, stuck_since_ns=7)


def test_a_stage_that_restarts_is_not_a_hang():
    assert feed(make_ready_watchdog(), *[heartbeat(i) for i in range(20)]) == [None] * 20


def test_a_long_idle_time_is_not_a_hang():
    assert feed(make_ready_watchdog(), *[heartbeat(7, IDLE)] * 20) == [None] * 20


def test_an_engine_that_takes_no_commands_is_hung_even_if_it_is_idle():
    beats = [heartbeat(7, IDLE)] * 8
    watchdog = make_ready_watchdog()
    assert feed(watchdog, *beats[:7], takes_commands=False) == [None] * 7
    assert feed(watchdog, *beats[:1]) == [None], "a step was long"
    results = feed(watchdog, *beats, takes_commands=False)
    assert results[:7] == [None] * 7
    assert results[7] == Stall(message="the m process has accepted no requests for 8 s")


def test_a_delayed_watchdog_reports_no_hang():
    """Replies that arrived in the meantime are processed first, and no clock measures the delay."""
    watchdog = make_ready_watchdog()
    feed(watchdog, heartbeat(1))
    for beat in range(2, 300):
        watchdog.note_message()
        reply = ProbeReply(heartbeat=heartbeat(beat, IDLE), takes_commands=True)
        watchdog.note_probe_reply(reply)
    assert watchdog.check() is None
