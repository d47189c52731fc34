"""Rank 0's engine tells the others all that decides what is computed, before it computes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.core.embeddings import EmbedJob
from app.core.errors import AppError
from app.core.jobs import Ended, Token
from app.runners.ranks.leader import LeaderLoop
from app.runners.ranks.protocol import Cancel, Embed, LeaderMessage, RunStep, StepChecksum, Submit
from tests.engine.harness import job, make_loop, tiny_model


class FakeStepGroup:
    """Notes what it is told. why: it was lost."""

    def __init__(self, why: str | None = None) -> None:
        self.told: list[LeaderMessage] = []
        self.why = why
        self.given_up: list[str] = []

    def broadcast(self, message: LeaderMessage) -> None:
        self.told.append(message)

    def wait_for_failure(self, timeout: float = 0.0) -> str | None:
        return self.why

    def fail(self, reason: str) -> None:
        self.given_up.append(reason)


def leading(group: FakeStepGroup) -> LeaderLoop:
    return LeaderLoop(make_loop(tiny_model(), running=2, policy="radix"), group)


def turns(group: FakeStepGroup) -> Sequence[RunStep]:
    assert all(isinstance(words, RunStep) for words in group.told)
    return [words for words in group.told if isinstance(words, RunStep)]


def test_others_are_told_what_rank_0_was_told_in_the_same_order() -> None:
    group = FakeStepGroup()
    loop = leading(group)
    assert loop.idle
    first, second = job("a", [1, 2, 3], seed=5), job("b", [4], seed=6)
    embed = EmbedJob(id="c", inputs=((1, 2),), pooling="mean")
    loop.submit(first)
    loop.submit(second)
    loop.embed(embed)
    loop.cancel("a", keep=0)
    loop.step()
    loop.step()
    commands = (Submit(job=first), Submit(job=second), Embed(job=embed), Cancel(job="a", keep=0))
    assert [turn.commands for turn in turns(group)] == [commands, ()]


def test_a_turn_says_what_came_of_those_before() -> None:
    group, said = FakeStepGroup(), StepChecksum()
    loop = leading(group)
    loop.submit(job("a", [1, 2, 3], max_tokens=4))
    expected, ids = list[int](), list[int]()
    while not loop.idle:
        expected.append(said.value)
        step = loop.step()
        said.update(step)
        ids += [update.id for update in step.updates if isinstance(update, Token)]
    assert len(ids) == 4
    assert [turn.checksum for turn in turns(group)] == expected
    assert len(set(expected)) > 2


def test_a_seed_that_nobody_chose_is_chosen_for_all() -> None:
    group = FakeStepGroup()
    loop = leading(group)
    asked = job("a", [1, 2, 3], temperature=1.0)
    assert asked.sampling.seed is None
    loop.submit(asked)
    loop.step()
    [submitted] = turns(group)[0].commands
    assert isinstance(submitted, Submit)
    seed = submitted.job.sampling.seed
    assert seed is not None
    assert submitted.job == replace(asked, sampling=replace(asked.sampling, seed=seed))


def test_without_the_others_there_is_no_step() -> None:
    group = FakeStepGroup(why="rank 1 (studio) disconnected")
    loop = leading(group)
    loop.submit(job("a", [1]))
    with pytest.raises(AppError, match=r"rank 1 \(studio\) disconnected"):
        loop.step()
    assert group.told == []


def test_a_step_that_failed_here_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, a loop goes on; the others may have computed it, or wait for the rest of a sum."""
    group = FakeStepGroup()
    model = tiny_model()
    loop = LeaderLoop(make_loop(model), group)
    loop.submit(job("a", [1, 2, 3]))

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(model), "__call__", broken)
    with pytest.raises(AppError, match="a step failed on rank 0"):
        loop.step()
    assert group.given_up == ["a step failed on rank 0"]


def test_a_request_that_ends_in_an_error_of_its_own_ends_nobody_else() -> None:
    group = FakeStepGroup()
    loop = leading(group)
    loop.submit(job("a", [1, 2, 3], max_tokens=2))
    ended = list[Ended]()
    while not loop.idle:
        ended += [update for update in loop.step().updates if isinstance(update, Ended)]
    assert [end.reason for end in ended] == ["length"]
    assert group.given_up == []
