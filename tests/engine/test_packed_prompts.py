"""Short prompts that arrive together share a forward pass, and their results stay the same."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from app.core.jobs import Job
from app.engine.model_runner import ModelRunner
from models.base import Model
from models.cpu_layout import is_batch_invariant
from tests.engine import hybrid
from tests.engine.harness import (
    ScheduledJob,
    assert_same,
    job,
    make_loop,
    run,
    run_one,
    run_schedule,
    tiny_model,
    token_bits,
)
from tests.models.kernel_switch import use_kernels

NONE = frozenset[int]()
CHUNK = 32

needs_kernels = pytest.mark.skipif(not is_batch_invariant(tiny_model()), reason="no kernels")


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the token arrays of all forward passes of tiny models."""
    return record_calls(monkeypatch, lambda tokens: None)


def record_calls(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[mx.array], None]
) -> list[tuple[int, ...]]:
    kind: Any = type(tiny_model())
    call = kind.__call__
    seen: list[tuple[int, ...]] = []

    def record(self: Any, tokens: mx.array, *others: Any) -> mx.array:
        seen.append(tokens.shape)
        check(tokens)
        return call(self, tokens, *others)

    monkeypatch.setattr(kind, "__call__", record)
    return seen


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 256), k=length)


@needs_kernels
def test_prompts_that_arrive_together_share_a_pass(shapes: list[tuple[int, ...]]) -> None:
    """Each one used to be a separate pass, which reads all weights."""
    model = tiny_model()
    jobs = [job(str(i), text(4, i), max_tokens=1, stop_token_ids=NONE) for i in range(8)]
    loop = make_loop(model, running=8, chunk=CHUNK, policy="radix")
    shapes.clear()
    together = run(loop, *jobs)
    assert shapes == [(8 * 4, 1)]
    for one in jobs:
        alone = run_one(make_loop(model, chunk=CHUNK), one)
        assert token_bits(together[one.id]) == token_bits(alone)


@needs_kernels
def test_a_pass_is_not_longer_than_a_chunk(shapes: list[tuple[int, ...]]) -> None:
    loop = make_loop(tiny_model(), running=9, chunk=CHUNK, policy="radix")
    shapes.clear()
    run(loop, *(job(str(i), text(11 * i + 1, i), max_tokens=1) for i in range(9)))
    assert all(rows * length <= CHUNK + CHUNK // 8 for rows, length in shapes)
    assert sum(rows * length for rows, length in shapes) == sum(11 * i + 1 for i in range(9))


REQUESTS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.3, "top_p": 0.8, "seed": 4},
    {"repetition_penalty": 1.8},
    {"prompt_logprobs": 3},
    {"max_tokens": 1},
]


@needs_kernels
@examples(max_examples=25, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(
            st.integers(1, 80),
            st.integers(0, 30),
            st.integers(0, 12),
            st.sampled_from(range(len(REQUESTS))),
            st.none() | st.integers(1, 9),
        ),
        min_size=2,
        max_size=7,
    ),
    policy=st.sampled_from(["radix", "slots", "multi_user"]),
)
def test_packed_prompts_have_the_same_bits_as_alone(
    model: Model, prompts: list[tuple[int, int, int, int, int | None]], policy: str
) -> None:
    """Prompts of any lengths, with shared prefixes, that arrive and are cancelled at any step."""
    shared = text(40, 99)
    schedule = list[ScheduledJob]()
    for i, (length, keep, at, request, cancel) in enumerate(prompts):
        changes = {"max_tokens": 6, "stop_token_ids": NONE} | REQUESTS[request]
        one = job(str(i), [*shared[:keep], *text(length, i)], **changes)
        schedule.append(
            ScheduledJob(job=one, at=at, cancelled_at=None if cancel is None else at + cancel)
        )
    loop = make_loop(model, running=6, chunk=CHUNK, policy=policy)
    together = run_schedule(loop, schedule)
    for item in schedule:
        assert isinstance(item.job, Job)
        alone = run_one(make_loop(model, chunk=CHUNK), item.job)
        got = together[item.job.id]
        if got.reason == "cancelled":
            assert token_bits(alone)[: len(got.tokens)] == token_bits(got)
        else:
            assert token_bits(got) == token_bits(alone)
            assert got.scores == alone.scores


def test_models_that_are_not_batch_invariant_do_not_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "prefill_packed", None)
    for model, exact in ((hybrid.Model(), False), (hybrid.Model(), True), (tiny_model(), True)):
        loop = make_loop(model, running=4, chunk=CHUNK, policy="radix", exact=exact)
        outcomes = run(loop, *(job(str(i), text(5, i), max_tokens=2) for i in range(4)))
        assert {outcome.error for outcome in outcomes.values()} == {None}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLX reports a GPU, and computes on the CPU."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    with use_kernels(enabled=False):
        yield


@pytest.mark.usefixtures("on_gpu")
def test_a_gpu_packs_short_prompts_at_the_positions_of_their_chunks(
    shapes: list[tuple[int, ...]], ties: list[int]
) -> None:
    """They used to be one pass each, because the kernels of a CPU were required."""
    model = tiny_model()
    jobs = [job(str(i), text(4, i), max_tokens=4, stop_token_ids=NONE) for i in range(6)]
    long = job("long", text(2 * CHUNK + 3, 9), max_tokens=4, stop_token_ids=NONE)
    loop = make_loop(model, running=8, chunk=CHUNK, policy="radix")
    shapes.clear()
    together = run(loop, *jobs, long)
    assert (6 * 4, 1) in shapes
    prompts = [shape for shape in shapes if shape[1] > 1]
    assert prompts == [(1, CHUNK), (1, CHUNK), (1, 3)]
    for one in (*jobs, long):
        alone = run_one(make_loop(model, chunk=CHUNK), one)
        ties.append(assert_same(together[one.id], alone))


@pytest.mark.usefixtures("on_gpu")
def test_a_gpu_does_not_pack_in_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "prefill_packed", None)
    loop = make_loop(tiny_model(), running=4, chunk=CHUNK, policy="radix", exact=True)
    outcomes = run(loop, *(job(str(i), text(5, i), max_tokens=2) for i in range(4)))
    assert {outcome.error for outcome in outcomes.values()} == {None}


@needs_kernels
def test_a_prompt_that_fails_in_a_pass_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others restart, each in a separate pass, and give the same results."""
    model = tiny_model()
    good = [job(str(i), text(6, i), max_tokens=5, stop_token_ids=NONE) for i in range(4)]
    alone = [run_one(make_loop(model, chunk=CHUNK), one) for one in good]

    def raise_for_zero(tokens: mx.array) -> None:
        if tokens.size > 1 and mx.any(tokens == 0).item():
            raise RuntimeError("planted")

    loop = make_loop(model, running=5, chunk=CHUNK, policy="radix")
    record_calls(monkeypatch, raise_for_zero)
    bad = job("bad", [*text(3, 9), 0], max_tokens=5)
    outcomes = run(loop, *good[:2], bad, *good[2:])
    assert outcomes["bad"].reason == "error"
    for one, expected in zip(good, alone, strict=True):
        assert token_bits(outcomes[one.id]) == token_bits(expected)
    assert loop.stats().failures == 1
