"""LoopTimeBudget: a share of the event loop's time."""

import pytest

from app.http import connection_limits
from app.http.connection_limits import LoopTimeBudget


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(connection_limits.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def run(share: LoopTimeBudget, clock: Clock, piece: float, seconds: float) -> float:
    """The seconds of work done within `seconds`, in pieces that wait for the budget."""
    end, work = clock.now + seconds, 0.0
    while clock.now < end:
        if share.delay_seconds:
            clock.now += share.delay_seconds
        else:
            clock.now += piece
            share.consume(piece)
            work += piece
    return work


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("piece", [0.0001, 0.001, 0.01])
def test_work_takes_its_share_for_any_size_of_pieces(clock: Clock, share: float, piece: float):
    done = run(LoopTimeBudget(share), clock, piece, 10.0)
    assert done == pytest.approx(10.0 * share, rel=0.05)


def test_a_pause_allows_only_a_short_burst(clock: Clock):
    share = LoopTimeBudget(0.25)
    run(share, clock, 0.001, 1.0)
    clock.now += 60.0
    start, pieces = clock.now, 0
    while not share.delay_seconds:
        clock.now += 0.0001
        share.consume(0.0001)
        pieces += 1
    assert clock.now - start == pytest.approx(0.0027, abs=0.0003)
    assert pieces < 30
