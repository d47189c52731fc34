"""Fair scheduling: sixty requests of one caller do not delay the request of another."""

from typing import Any

import pytest

from app.core.jobs import Job, Started
from app.engine.loop import Loop
from tests.engine.harness import job, make_loop, submit, tiny_model
from tests.engine.test_preemption import footprint


def start_order(loop: Loop, *jobs: Job) -> list[str]:
    """Names of jobs, in the order in which they start; all are submitted at the beginning."""
    for one in jobs:
        submit(loop, one)
    order: list[str] = []
    while not loop.idle:
        order += [u.job_id for u in loop.step().updates if isinstance(u, Started)]
        loop.check()
    return order


def make_jobs(caller: str, count: int) -> list[Job]:
    return [job(f"{caller}{n}", b"hello", caller=caller, max_tokens=3) for n in range(count)]


@pytest.mark.parametrize("running", [1, 2, 4])
def test_a_single_request_of_another_caller_is_next(running: int) -> None:
    """With one slot nothing runs while the next is chosen, so the last served caller counts."""
    loop = make_loop(tiny_model(), policy="radix", running=running)
    order = start_order(loop, *make_jobs("a", 12), *make_jobs("b", 1))
    assert order.index("b0") <= 1


def test_two_busy_callers_take_turns() -> None:
    loop = make_loop(tiny_model(), policy="radix", running=1)
    order = start_order(loop, *make_jobs("a", 4), *make_jobs("b", 4))
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


def test_without_callers_requests_start_in_order() -> None:
    loop = make_loop(tiny_model(), policy="radix", running=1)
    assert start_order(loop, *make_jobs("", 5)) == ["0", "1", "2", "3", "4"]


def test_a_preempted_sequence_resumes_before_new_ones_start() -> None:
    """Memory fits two new sequences, but not the growth of both; b has not run, and still waits."""
    model = tiny_model()
    loop = make_loop(
        model, running=2, policy="radix", chunk=64, budget=2 * footprint(model, 512), context=1024
    )
    long: dict[str, Any] = {"caller": "a", "max_tokens": 400, "stop_token_ids": frozenset[int]()}
    for n in range(2):
        submit(loop, job(f"a{n}", [n + 1] * 200, **long))
    while not loop.stats().preemptions:
        loop.step()
    [other] = make_jobs("b", 1)
    submit(loop, other)
    while not any(isinstance(u, Started) and u.job_id == other.id for u in loop.step().updates):
        loop.check()
    assert loop.stats().waiting == 0, "it started while a preempted sequence waited"
