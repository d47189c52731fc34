"""min_tokens: no stop token is drawn before that many others, with any other rows and after
preemptions and context shifts."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from app.engine.memory_profile import profile_memory
from app.engine.sampling.sampler import SamplerBatch
from models.base import Model
from tests import tiny
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
from tests.engine.sampling.cases import LOGITS, VOCAB, make_state, pack_bits, to_list
from tests.rows import rows

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid": hybrid.Model}
PROMPT = tuple(b"a prompt to go on from")

# a stop token is always the most likely one
EAGER = {"logit_bias": ((tiny.END, 1000.0), (7, 900.0)), "stop_token_ids": frozenset({tiny.END, 7})}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5},
    "best": {"temperature": 0.7, "seed": 6, "top_k": 5},
    "nucleus": {"temperature": 0.9, "seed": 7, "top_p": 0.5, "min_p": 0.01},
    "penalised": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


@rows("kind", KINDS)
@rows("min_tokens", [0, 1, 2, 9])
def test_an_answer_ends_after_exactly_min_tokens(kind: str, min_tokens: int) -> None:
    request = job("a", PROMPT, min_tokens=min_tokens, max_tokens=20, **EAGER, **KINDS[kind])
    outcome = run_one(make_loop(tiny_model()), request)
    assert (len(outcome.tokens), outcome.reason) == (min_tokens, "stop")
    assert not EAGER["stop_token_ids"] & set(outcome.ids)


def test_min_tokens_do_not_change_an_answer_that_does_not_end() -> None:
    model, plain = (
        tiny_model(),
        {"stop_token_ids": frozenset({tiny.END}), "temperature": 0.8, "seed": 1},
    )
    free = run_one(make_loop(model), job("a", PROMPT, **plain))
    assert (free.reason, len(free.tokens)) == ("length", 12)
    limited = run_one(make_loop(model), job("a", PROMPT, min_tokens=12, **plain))
    assert (limited.ids, limited.reason) == (free.ids, "length")


def test_without_stop_tokens_an_answer_ends_by_length() -> None:
    """As with `ignore_eos`: the id is sampled, and reported like any other."""
    request = job("a", PROMPT, **{**EAGER, "stop_token_ids": frozenset[int]()}, min_tokens=3)
    outcome = run_one(make_loop(tiny_model()), request)
    assert (outcome.ids, outcome.reason) == ([tiny.END] * 12, "length")


def test_other_rows_change_nothing(model: Model, ties: list[int]) -> None:
    """Rows with different min_tokens, which start and end at different steps."""
    jobs = [
        job(
            f"{kind} {min_tokens}",
            PROMPT[: 9 + min_tokens],
            min_tokens=min_tokens,
            **EAGER,
            **KINDS[kind],
        )
        for kind in KINDS
        for min_tokens in (0, 4, 11)
    ]
    loop = make_loop(model, running=5, policy="radix")
    together = run_schedule(loop, [ScheduledJob(job=one, at=i) for i, one in enumerate(jobs)])
    for one in jobs:
        assert len(together[one.id].tokens) == one.min_tokens
        ties.append(assert_same(together[one.id], run_one(make_loop(model), one)))


def test_a_preempted_sequence_keeps_its_count(model: Model, ties: list[int]) -> None:
    memory = profile_memory(
        model, budget=0, weights=0, chunk=64, max_batch_size=1, heads=0, context=512
    )
    jobs = [
        job(
            str(i), bytes([i] * 200), min_tokens=330, max_tokens=350, **EAGER, temperature=0.8,
            seed=i,
        )
        for i in range(3)
    ]  # fmt: skip
    loop = make_loop(
        model,
        running=3,
        policy="radix",
        chunk=64,
        budget=3 * memory.kv_footprint(512),
        context=1024,
    )
    together = run_schedule(loop, [ScheduledJob(job=one) for one in jobs])
    assert loop.stats().preemptions > 0
    for one in jobs:
        assert (len(together[one.id].tokens), together[one.id].reason) == (330, "stop")
        ties.append(assert_same(together[one.id], run_one(make_loop(model), one)))


def test_a_shifted_context_keeps_the_count(model: Model) -> None:
    loop = make_loop(model, policy="slots", context=48, shift=True)
    outcome = run_one(loop, job("a", PROMPT, min_tokens=90, max_tokens=100, **EAGER))
    assert (len(outcome.tokens), outcome.reason) == (90, "stop")


def test_a_rebuilt_batch_keeps_the_count() -> None:
    """The batch is rebuilt whenever a row joins or leaves."""
    state = make_state(stop_token_ids=frozenset({0}), min_tokens=5, temperature=0.0)
    tokens: list[int] = []
    for turns in (2, 1, 3):
        rows = SamplerBatch([state])
        tokens += [to_list(rows.sample(mx.array([LOGITS])).tokens)[0] for _ in range(turns)]
        rows.release()
    assert tokens == [1] * 5 + [0]


def test_a_grammar_and_min_tokens_work_in_one_batch() -> None:
    limited = make_state(stop_token_ids=frozenset({0}), min_tokens=1, temperature=0.0)
    allowed = np.ones((2, VOCAB), bool)
    allowed[1, :3] = False
    rows = SamplerBatch([limited, make_state(temperature=0.0)])
    both = mx.array([LOGITS, LOGITS])
    assert to_list(rows.sample(both, bitmask=pack_bits(allowed)).tokens) == [1, 3]
    assert to_list(rows.sample(both, bitmask=pack_bits(allowed)).tokens) == [0, 3]
