"""The time of a step decides how many prompt chunks it takes, and never where they begin."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.engine.model_runner import ModelRunner
from app.engine.policy import MIN_RUNNING
from app.engine.sequence import Sequence
from models.cpu_layout import is_batch_invariant
from tests.engine import hybrid
from tests.engine.harness import (
    Outcome,
    ScheduledJob,
    job,
    make_loop,
    run_schedule,
    tiny_model,
    token_bits,
)

CHUNK, RUNNING = 16, 5
NONE = frozenset[int]()


def _ticks(step: Callable[[random.Random], float]) -> Callable[[int], Iterator[float]]:
    def ticks(seed: int) -> Iterator[float]:
        rng = random.Random(seed)
        now = 1000.0
        while True:
            now += step(rng)
            yield now

    return ticks


# seconds between two readings of the clock
CLOCKS: dict[str, Callable[[int], Iterator[float]]] = {
    "stands": _ticks(lambda _: 0.0),
    "very fast": _ticks(lambda _: 1e-6),
    "fast": _ticks(lambda _: 1e-2),
    "at the limit": _ticks(lambda _: 0.1),
    "slow": _ticks(lambda _: 1.0),
    "very slow": _ticks(lambda _: 1e4),
    "random": _ticks(lambda rng: rng.random()),
    "mostly fast": _ticks(lambda rng: rng.choice([1e-5, 1e-5, 1e-5, 3.0])),
    "backwards": _ticks(lambda _: -0.5),
    "back and forth": _ticks(lambda rng: rng.uniform(-1.0, 1.0)),
}

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid": hybrid.Model}


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def test_no_sequence_starts_if_decode_steps_are_too_long() -> None:
    """With many slots, the pauses of running streams would grow without a limit. Here a decode step
    takes a second per ten sequences."""
    now, tick = 0.0, 0.0

    def clock() -> float:
        nonlocal now
        now += tick
        return now

    loop = make_loop(
        tiny_model(), running=30, chunk=CHUNK, policy="radix", decode_seconds=0.25, clock=clock
    )

    def step() -> int:
        nonlocal tick
        tick = 0.1 * loop.stats().running  # a step reads the clock at its start and its end
        return loop.step().stats.running

    def submit(names: range, length: int) -> None:
        for i in names:
            loop.submit(job(str(i), text(4, i), max_tokens=length, stop_token_ids=NONE))

    submit(range(12), 60)
    assert max(step() for _ in range(40)) == 12, "nothing was measured before they started"
    submit(range(12, 30), 20)
    running = [step() for _ in range(15)]
    assert set(running) == {12}
    while not loop.idle:
        running.append(step())
    after = running[next(i for i, count in enumerate(running) if count < 12) :]
    assert max(after) == MIN_RUNNING


def run_under(
    clock: str, model: Any, *, exact: bool, load: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Outcome, list[tuple[int, int]], int]:
    """One prompt alongside `load` other requests, which come and go. Returns its outcome, its
    chunks, and the largest number of chunks in a step."""
    chunks: list[tuple[int, int]] = []
    counts: list[int] = []
    prefill = ModelRunner.prefill

    def record(self: ModelRunner, sequence: Sequence, count: int) -> Any:
        counts[-1] += 1
        if sequence.job.id == "it":
            chunks.append((sequence.num_computed_tokens, count))
        return prefill(self, sequence, count)

    ticks = CLOCKS[clock](load)
    loop = make_loop(
        model,
        running=RUNNING,
        chunk=CHUNK,
        policy="radix",
        exact=exact,
        step_seconds=0.1,
        clock=lambda: next(ticks),
    )
    step = loop.step

    def count_step() -> Any:
        counts.append(0)
        return step()

    schedule = [
        ScheduledJob(
            job=job(str(i), text(20 + 37 * i % 90, i), max_tokens=5 + i, stop_token_ids=NONE),
            at=2 * i,
            cancelled_at=2 * i + 7 if i % 3 == 2 else None,
        )
        for i in range(load)
    ]
    # the prompt is twice there: the second time, most of it is cached
    first = job("before", text(150, 99)[:100], max_tokens=2, stop_token_ids=NONE)
    it = job("it", text(150, 99), max_tokens=6, stop_token_ids=NONE)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "prefill", record)
        patch.setattr(loop, "step", count_step)
        run_schedule(loop, [ScheduledJob(job=first)])
        outcome = run_schedule(loop, [*schedule, ScheduledJob(job=it, at=3)])["it"]
    return outcome, chunks, max(counts)


@pytest.mark.parametrize(("kind", "exact"), [("hybrid", False), ("hybrid", True), ("llama", True)])
def test_one_prompt_has_the_same_bits_under_ten_clocks(
    kind: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are the same too, under any load. With other rows in the batch, a model that is
    not batch-invariant rounds differently from the second token on."""
    assert len(CLOCKS) == 10
    model = MODELS[kind]()
    assert kind != "hybrid" or not is_batch_invariant(model)
    reference, expected, _ = run_under(
        "stands", model, exact=exact, load=0, monkeypatch=monkeypatch
    )
    assert reference.cached > 0
    assert len(expected) > 2
    most = set[int]()
    for clock, load in itertools.product(CLOCKS, (0, 6)):
        outcome, chunks, rounds = run_under(
            clock, model, exact=exact, load=load, monkeypatch=monkeypatch
        )
        most.add(rounds)
        assert chunks == expected, clock
        compared = len(outcome.tokens) if load == 0 else 1
        assert token_bits(outcome)[:compared] == token_bits(reference)[:compared], clock
    assert min(most) == 1
    assert max(most) > 4, "the clocks must change the number of chunks"


def test_a_batch_invariant_model_has_the_same_bits_under_any_clock_and_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    if not is_batch_invariant(model):
        pytest.skip("needs the CPU kernels")
    reference, _, _ = run_under("slow", model, exact=False, load=0, monkeypatch=monkeypatch)
    for clock in CLOCKS:
        outcome, _, _ = run_under(clock, model, exact=False, load=6, monkeypatch=monkeypatch)
        assert token_bits(outcome) == token_bits(reference), clock
