"""Callers take turns: one that sends sixty requests does not keep another waiting for sixty."""

from typing import Any

import pytest

from app.core.jobs import Job, Started
from app.engine.loop import Loop
from tests.engine.harness import job, make_loop, submit, tiny_model
from tests.engine.test_preemption import footprint


def started(loop: Loop, *jobs: Job) -> list[str]:
    """Names of jobs, in the order in which they start; all are there from the beginning."""
    for one in jobs:
        submit(loop, one)
    order: list[str] = []
    while not loop.idle:
        order += [u.job_id for u in loop.step().updates if isinstance(u, Started)]
        loop.check()
    return order


def many(caller: str, count: int) -> list[Job]:
    return [job(f"{caller}{n}", b"hello", caller=caller, max_tokens=3) for n in range(count)]


@pytest.mark.parametrize("running", [1, 2, 4])
def test_the_one_request_of_another_is_next(running: int) -> None:
    """With one place nobody runs while the next is chosen, so it counts who was served last."""
    loop = make_loop(tiny_model(), policy="radix", running=running)
    order = started(loop, *many("a", 12), *many("b", 1))
    assert order.index("b0") <= 1


def test_two_with_much_to_do_take_turns() -> None:
    loop = make_loop(tiny_model(), policy="radix", running=1)
    order = started(loop, *many("a", 4), *many("b", 4))
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


def test_without_callers_first_come_is_first_served() -> None:
    loop = make_loop(tiny_model(), policy="radix", running=1)
    assert started(loop, *many("", 5)) == ["0", "1", "2", "3", "4"]


def test_whoever_had_to_make_way_goes_on_before_others_begin() -> None:
    """Room for two to begin, and not for both to go on; b has had nothing, and waits still."""
    model = tiny_model()
    loop = make_loop(
        model, running=2, policy="radix", chunk=64, budget=2 * footprint(model, 512), context=1024
    )
    long: dict[str, Any] = {"caller": "a", "max_tokens": 400, "stop_token_ids": frozenset[int]()}
    for n in range(2):
        submit(loop, job(f"a{n}", [n + 1] * 200, **long))
    while not loop.stats().preemptions:
        loop.step()
    [other] = many("b", 1)
    submit(loop, other)
    while not any(isinstance(u, Started) and u.job_id == other.id for u in loop.step().updates):
        loop.check()
    assert loop.stats().waiting == 0, "it began while another waited to go on"
