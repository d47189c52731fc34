"""Rank 0's engine broadcasts the commands of a step before it computes the step."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.core.errors import AppError
from app.core.jobs import Ended, GetPrefixSnapshot, Token
from app.core.requests import EmbedJob
from app.runners.ranks.leader import LeaderLoop
from app.runners.ranks.protocol import (
    LeaderMessage,
    RunStep,
    StepChecksum,
)
from app.runners.worker_protocol import Cancel, Embed, Submit
from tests.engine.harness import job, make_loop, tiny_model


class FakeStepGroup:
    """Records messages. why: the reason of its failure."""

    def __init__(self, why: str | None = None) -> None:
        self.messages: list[LeaderMessage] = []
        self.why = why
        self.failures: list[str] = []

    def broadcast(self, message: LeaderMessage) -> None:
        self.messages.append(message)

    def wait_for_failure(self, timeout: float = 0.0) -> str | None:
        return self.why

    def fail(self, reason: str) -> None:
        self.failures.append(reason)


def make_leader_loop(group: FakeStepGroup) -> LeaderLoop:
    return LeaderLoop(make_loop(tiny_model(), running=2, policy="radix"), group)


def broadcast_steps(group: FakeStepGroup) -> Sequence[RunStep]:
    assert all(isinstance(message, RunStep) for message in group.messages)
    return [message for message in group.messages if isinstance(message, RunStep)]


def test_commands_are_broadcast_in_order() -> None:
    group = FakeStepGroup()
    loop = make_leader_loop(group)
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
    assert [message.commands for message in broadcast_steps(group)] == [commands, ()]


def test_a_snapshot_of_the_cache_is_taken_on_rank_0_only() -> None:
    group = FakeStepGroup()
    loop = make_leader_loop(group)
    loop.submit(job("a", [1, 2, 3], max_tokens=4))
    while not loop.idle:
        loop.step()
    steps = len(group.messages)
    assert sum(node.tokens for node in loop.call(GetPrefixSnapshot()).nodes) >= 3
    assert len(group.messages) == steps


def test_a_step_contains_the_checksum_of_earlier_steps() -> None:
    group, checksum = FakeStepGroup(), StepChecksum()
    loop = make_leader_loop(group)
    loop.submit(job("a", [1, 2, 3], max_tokens=4))
    expected, ids = list[int](), list[int]()
    while not loop.idle:
        expected.append(checksum.value)
        step = loop.step()
        checksum.update(step)
        ids += [update.id for update in step.updates if isinstance(update, Token)]
    assert len(ids) == 4
    assert [message.checksum for message in broadcast_steps(group)] == expected
    assert len(set(expected)) > 2


def test_a_missing_seed_is_chosen_for_all_ranks() -> None:
    group = FakeStepGroup()
    loop = make_leader_loop(group)
    request = job("a", [1, 2, 3], temperature=1.0)
    assert request.sampling.seed is None
    loop.submit(request)
    loop.step()
    [submitted] = broadcast_steps(group)[0].commands
    assert isinstance(submitted, Submit)
    seed = submitted.job.sampling.seed
    assert seed is not None
    assert submitted.job == replace(request, sampling=replace(request.sampling, seed=seed))


def test_no_step_runs_without_the_other_ranks() -> None:
    group = FakeStepGroup(why="rank 1 (studio) disconnected")
    loop = make_leader_loop(group)
    loop.submit(job("a", [1]))
    with pytest.raises(AppError, match=r"rank 1 \(studio\) disconnected"):
        loop.step()
    assert group.messages == []


def test_a_failed_step_on_rank_0_fails_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop without ranks continues; other ranks may have computed the step, or wait for a sum."""
    group = FakeStepGroup()
    model = tiny_model()
    loop = LeaderLoop(make_loop(model), group)
    loop.submit(job("a", [1, 2, 3]))

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(model), "__call__", fail)
    with pytest.raises(AppError, match="a step failed on rank 0"):
        loop.step()
    assert group.failures == ["a step failed on rank 0"]


def test_the_end_of_a_request_does_not_fail_the_group() -> None:
    group = FakeStepGroup()
    loop = make_leader_loop(group)
    loop.submit(job("a", [1, 2, 3], max_tokens=2))
    ended = list[Ended]()
    while not loop.idle:
        ended += [update for update in loop.step().updates if isinstance(update, Ended)]
    assert [end.reason for end in ended] == ["length"]
    assert group.failures == []
