"""What a runner's process and its parent say to each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, Kind, quote_client
from app.core.jobs import EngineStats, PromptScores, Started, Step, Token
from app.core.settings import Settings
from app.runners import wire
from app.runners.wire import Joiner, MoreScores


def scores(count: int, top: int = 2) -> wire.Scores:
    return tuple((-i / 7, tuple((j, -j / 3) for j in range(top))) for i in range(count))


def joined(pieces: list[MoreScores | Step]) -> list[Step]:
    joiner, steps = Joiner(), list[Step]()
    for piece in pieces:
        if isinstance(piece, MoreScores):
            joiner.hold(piece)
        else:
            steps.append(joiner.joined(piece))
    return steps


@given(counts=st.lists(st.sampled_from([0, 1, 511, 512, 513, 1500]), max_size=3))
def test_long_scores_are_cut_up_and_joined_again(counts: list[int]):
    updates = [
        Started(job="x", cached=0, at=1),
        *(PromptScores(job=f"job {i}", scores=scores(n)) for i, n in enumerate(counts)),
        Token(job="y", id=1, at=2),
    ]
    step = Step(updates=tuple(updates), stats=EngineStats(steps=3))
    pieces = list(wire.split(step))
    assert joined(pieces) == [step]
    for piece in pieces:
        parts = [piece] if isinstance(piece, MoreScores) else piece.updates
        lengths = [len(p.scores) for p in parts if isinstance(p, (MoreScores, PromptScores))]
        assert all(length <= 512 for length in lengths)


def test_a_step_without_scores_is_one_line():
    step = Step(updates=(Token(job="a", id=1, at=2),), stats=EngineStats())
    assert list(wire.split(step)) == [step]


def test_an_error_crosses_with_all_that_it_says():
    error = AppError(
        Kind.INVALID,
        f"no such {quote_client('grammar')}",
        param="response_format",
        code="grammar",
        retry_after=3,
    )
    back = wire.app_error(wire.PROBLEM.decode(wire.PROBLEM.encode(wire.problem(error))))
    assert vars(back) == vars(error)


@pytest.mark.parametrize(("watchdog", "seconds"), [(60.0, 1.0), (4.0, 1.0), (0.4, 0.1)])
def test_a_heart_beats_several_times_before_it_counts_as_stopped(watchdog: float, seconds: float):
    assert wire.beat_interval(Settings(watchdog=watchdog)) == seconds
