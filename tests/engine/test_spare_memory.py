"""Spare memory: only cached prefixes use it, it is given back between two steps, and no answer
changes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from app.core.jobs import Job, SetSpareMemory
from app.engine.loop import Loop
from models.base import Model
from tests.engine import hybrid
from tests.engine.harness import (
    Outcome,
    assert_same,
    job,
    make_loop,
    record,
    run_one,
    submit,
    tiny_model,
    token_bits,
)
from tests.engine.test_preemption import footprint

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid": hybrid.Model}
NONE = frozenset[int]()


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


def set_spare_memory(loop: Loop, num_bytes: int) -> int:
    return loop.call(SetSpareMemory(num_bytes=num_bytes))


def prompt(seed: int, length: int) -> list[int]:
    return [(7 * seed + n * n) % 256 for n in range(length)]


def cached_tokens(loop: Loop, count: int) -> list[int]:
    """How many tokens of each of the prompts are cached, computed twice."""
    found: list[int] = []
    for _ in range(2):
        found = [
            run_one(loop, job(str(i), prompt(i, 200), max_tokens=2, stop_token_ids=NONE)).cached
            for i in range(count)
        ]
    return found


def test_cached_prefixes_use_spare_memory_until_it_is_taken_back() -> None:
    model = tiny_model()
    loop = make_loop(model, running=2, policy="radix", budget=3 * footprint(model, 256))
    assert cached_tokens(loop, 8) == [0] * 8, "in turn, each evicts the next one"
    assert set_spare_memory(loop, 8 * footprint(model, 256)) == 8 * footprint(model, 256)
    assert all(count >= 199 for count in cached_tokens(loop, 8))
    ledger = loop.stats().ledger
    assert (ledger.budget, ledger.prefix_limit) == (11 * footprint(model, 256),) * 2
    assert set_spare_memory(loop, 0) == 0
    ledger = loop.stats().ledger
    assert (ledger.budget, ledger.prefix_limit) == (3 * footprint(model, 256),) * 2
    assert ledger.prefix <= 3 * footprint(model, 256)
    assert cached_tokens(loop, 8) == [0] * 8


def test_requests_wait_for_the_budget_although_there_is_spare_memory() -> None:
    model = tiny_model()
    loop = make_loop(model, running=4, policy="radix", budget=footprint(model, 256))
    set_spare_memory(loop, 100 * footprint(model, 256))
    assert loop.capacity.context_length == 256
    for i in range(3):
        submit(loop, job(str(i), prompt(i, 100), max_tokens=10, stop_token_ids=NONE))
    while not loop.idle:
        assert loop.step().stats.running <= 1
    assert loop.stats().preemptions == 0


def test_memory_of_running_sequences_is_taken_back_when_they_end() -> None:
    """Two short conversations take over the layer caches of two long ones, of which little is
    cached."""
    model = tiny_model()
    unit = footprint(model, 256)
    loop = make_loop(model, running=2, policy="multi_user", chunk=64, budget=4 * unit, context=1024)
    assert set_spare_memory(loop, 8 * unit) == 8 * unit
    for i in range(2):
        long = job(f"long {i}", prompt(i, 20), max_tokens=990, stop_token_ids=NONE)
        submit(loop, long)
        while loop.stats().ledger.kv < 4 * unit:
            loop.step()
        loop.cancel(long.id, keep=0)
        loop.step()
    short = [
        job(f"short {i}", prompt(i, 21), max_tokens=20 + 40 * i, stop_token_ids=NONE)
        for i in range(2)
    ]
    for one in short:
        submit(loop, one)
    outcomes = {one.id: Outcome() for one in short}
    allowed = [8 * unit]
    while not loop.idle:
        output = loop.step()
        for update in output.updates:
            record(outcomes[update.job_id], update)
        loop.check()
        if any(outcome.tokens for outcome in outcomes.values()):
            allowed.append(set_spare_memory(loop, 0))
    assert allowed == sorted(allowed, reverse=True)
    assert allowed[1] == 2 * unit, "both hold three units"
    assert allowed[-1] == 0
    assert loop.stats().preemptions == 0
    for one in short:
        assert outcomes[one.id].ids == run_one(make_loop(model, chunk=64), one).ids


@examples(max_examples=8, deadline=None)
@given(data=st.data())
def test_no_history_of_spare_memory_overdraws_the_ledger_or_changes_an_answer(
    model: Model, data: st.DataObject
) -> None:
    """The jobs continue each other's conversations, so that running sequences take over caches from
    spare memory."""
    unit = footprint(model, 256)
    base = data.draw(st.integers(2, 4)) * unit
    policy = data.draw(st.sampled_from(["radix", "multi_user"]))
    loop = make_loop(model, running=4, policy=policy, chunk=64, budget=base)
    jobs: list[Job] = []
    outcomes: dict[str, Outcome] = {}
    desired = allowed = 0
    events = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("spare"), st.integers(0, 6)),
                st.tuples(st.just("job"), st.integers(0, 2)),
                st.tuples(st.just("steps"), st.integers(1, 12)),
            ),
            min_size=4,
            max_size=16,
        )
    )
    for event, number in (*events, ("steps", 5000)):
        if event == "spare":
            desired = number * unit
            before, allowed = allowed, set_spare_memory(loop, desired)
            assert desired <= allowed <= max(before, desired)
        elif event == "job":
            past = [one for one in jobs if one.prompt_token_ids[0] == number]
            done = [one for one in past if outcomes[one.id].reason]
            ids = [number, *prompt(number, data.draw(st.integers(1, 120)))]
            if done:
                ids = [*done[-1].prompt_token_ids, *outcomes[done[-1].id].ids, 1, 2, 3]
            if len(ids) > 230:
                continue
            one = job(str(len(jobs)), ids, max_tokens=20, stop_token_ids=NONE)
            jobs.append(one)
            outcomes[one.id] = Outcome()
            submit(loop, one)
        for _ in range(number if event == "steps" else 0):
            if loop.idle:
                break
            output = loop.step()
            for update in output.updates:
                record(outcomes[update.job_id], update)
            loop.check()
            ledger = output.stats.ledger
            assert ledger.free >= 0
            assert base + desired <= ledger.budget <= base + max(allowed, desired)
    assert loop.idle
    assert set_spare_memory(loop, 0) == 0, "no request uses it any more"
    assert loop.stats().ledger.budget == base
    for one in jobs:
        alone = run_one(make_loop(model, chunk=64), one)
        if loop.batch_invariant:
            assert token_bits(outcomes[one.id]) == token_bits(alone)
        else:  # without the CPU kernels
            assert_same(outcomes[one.id], alone)
