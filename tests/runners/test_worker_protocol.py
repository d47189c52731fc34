"""The messages between a model process and its parent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.jobs import EngineStats, PromptLogprobs, Started, StepOutput, Token
from app.core.settings import Settings
from app.runners import worker_protocol
from app.runners.worker_protocol import PromptScoresChunk, StepJoiner


def scores(count: int, top: int = 2) -> worker_protocol.Scores:
    return tuple((-i / 7, tuple((j, -j / 3) for j in range(top))) for i in range(count))


def join(pieces: list[PromptScoresChunk | StepOutput]) -> list[StepOutput]:
    joiner, steps = StepJoiner(), list[StepOutput]()
    for piece in pieces:
        if isinstance(piece, PromptScoresChunk):
            joiner.add(piece)
        else:
            steps.append(joiner.join(piece))
    return steps


@given(counts=st.lists(st.sampled_from([0, 1, 511, 512, 513, 1500]), max_size=3))
def test_long_scores_are_split_and_joined(counts: list[int]):
    updates = [
        Started(job_id="x", cached_tokens=0, timestamp_ns=1),
        *(PromptLogprobs(job_id=f"job {i}", logprobs=scores(n)) for i, n in enumerate(counts)),
        Token(job_id="y", id=1, timestamp_ns=2),
    ]
    step = StepOutput(updates=tuple(updates), stats=EngineStats(steps=3))
    pieces = list(worker_protocol.split_step(step))
    assert join(pieces) == [step]
    for piece in pieces:
        parts = [piece] if isinstance(piece, PromptScoresChunk) else piece.updates
        lengths = [
            len(p.scores if isinstance(p, PromptScoresChunk) else p.logprobs)
            for p in parts
            if isinstance(p, (PromptScoresChunk, PromptLogprobs))
        ]
        assert all(length <= 512 for length in lengths)


def test_a_step_without_scores_is_one_line():
    step = StepOutput(updates=(Token(job_id="a", id=1, timestamp_ns=2),), stats=EngineStats())
    assert list(worker_protocol.split_step(step)) == [step]


def test_an_error_keeps_all_its_fields():
    error = AppError(
        ErrorKind.INVALID,
        f"no such {mark_client_text('grammar')}",
        param="response_format",
        code="grammar",
        retry_after=3,
    )
    back = worker_protocol.build_app_error(
        worker_protocol.ERROR_BODY.decode(
            worker_protocol.ERROR_BODY.encode(worker_protocol.build_error_body(error))
        )
    )
    assert vars(back) == vars(error)


@pytest.mark.parametrize(("watchdog", "seconds"), [(60.0, 1.0), (4.0, 1.0), (0.4, 0.1)])
def test_several_heartbeats_fit_in_the_time_of_the_watchdog(watchdog: float, seconds: float):
    assert worker_protocol.heartbeat_interval(Settings(watchdog=watchdog)) == seconds
