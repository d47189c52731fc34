"""Memory pressure: prefixes are evicted, then the youngest is preempted; answers stay the same."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from app.core.jobs import Job
from app.engine.memory_profile import profile_memory
from models.base import Model
from tests.engine import hybrid
from tests.engine.harness import (
    ScheduledJob,
    assert_same,
    job,
    make_loop,
    run_one,
    run_schedule,
    tiny_model,
)

pytestmark = pytest.mark.recorded

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid": hybrid.Model}
NONE = frozenset[int]()
LONG = 350


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


def footprint(model: Model, positions: int) -> int:
    memory = profile_memory(
        model, budget=0, weights=0, chunk=8, max_batch_size=1, heads=0, context=512
    )
    return memory.kv_footprint(positions)


@pytest.mark.product
@pytest.mark.no_cover
@pytest.mark.parametrize("policy", ["radix", "slots"])
def test_preemption_does_not_change_the_answer(model: Model, policy: str, ties: list[int]) -> None:
    """Memory fits four new sequences, but not their growth."""
    budget = 4 * footprint(model, 512)
    jobs = [
        job(
            str(i),
            bytes(rng.choices(range(256), k=200)),
            max_tokens=LONG,
            stop_token_ids=NONE,
            temperature=0.8,
            seed=i,
            repetition_penalty=1.1,
        )
        for i, rng in enumerate(map(random.Random, range(4)))
    ]
    loop = make_loop(model, running=4, policy=policy, chunk=64, budget=budget, context=1024)
    together = run_schedule(loop, [ScheduledJob(job=one, at=i) for i, one in enumerate(jobs)])
    assert loop.stats().preemptions > 0
    for one in jobs:
        assert len(together[one.id].tokens) == LONG
        ties.append(assert_same(together[one.id], run_one(make_loop(model), one)))


@examples(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_ledger_is_never_overdrawn(model: Model, data: st.DataObject) -> None:
    """`run_schedule` checks after every step that the ledger is not overdrawn."""
    num_sequences = data.draw(st.integers(2, 5))
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=6))
    loop = make_loop(
        model, running=4, policy="radix", chunk=64, budget=num_sequences * footprint(model, 256)
    )
    max_length = loop.capacity.context_length
    schedule = [
        ScheduledJob(
            job=job(
                str(i),
                bytes((7 * i + n) % 256 for n in range(min(length, max_length - 20))),
                max_tokens=20,
                stop_token_ids=NONE,
            ),
            at=2 * i,
            cancelled_at=data.draw(st.none() | st.integers(2 * i + 1, 40)),
        )
        for i, length in enumerate(lengths)
    ]
    for scheduled in schedule:
        outcome = run_schedule(loop, [scheduled])[scheduled.job.id]
        assert outcome.reason in ("length", "cancelled")
    prompts = {v.job.id: v.job.prompt_token_ids for v in schedule if isinstance(v.job, Job)}
    again = [
        ScheduledJob(job=job(f"again {id}", ids, max_tokens=5, stop_token_ids=NONE))
        for id, ids in prompts.items()
    ]
    assert all(len(o.tokens) == 5 for o in run_schedule(loop, again).values())


def test_cached_prefixes_are_evicted_before_a_sequence_is_preempted() -> None:
    model = tiny_model()
    loop = make_loop(model, running=2, policy="radix", budget=3 * footprint(model, 256))
    for i in range(4):
        run_one(loop, job(str(i), [i] * 200, max_tokens=4, stop_token_ids=NONE))
    stats = loop.stats()
    assert stats.prefix_evictions > 0
    assert stats.preemptions == 0
    assert stats.ledger.free >= 0


def test_a_sequence_that_does_not_fit_yet_waits() -> None:
    model = tiny_model()
    loop = make_loop(model, running=4, policy="radix", budget=footprint(model, 256))
    outcomes = run_schedule(
        loop,
        [
            ScheduledJob(job=job(str(i), [i] * 100, max_tokens=10, stop_token_ids=NONE))
            for i in range(3)
        ],
    )
    assert all(len(outcome.tokens) == 10 for outcome in outcomes.values())
    assert loop.stats().preemptions == 0


def test_the_capacity_reports_the_context_that_fits() -> None:
    model = tiny_model()
    tight = make_loop(model, budget=footprint(model, 256)).capacity
    assert (tight.context_length, tight.limited_by_memory) == (256, True)
    wide = make_loop(model, context=300).capacity
    assert (wide.context_length, wide.limited_by_memory) == (300, False)
    assert wide.kv_bytes_per_sequence == footprint(model, 300)
