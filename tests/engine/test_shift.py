"""A sequence that outgrows its context: the loop against a reference context shift."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import pytest

from app.core.context_shift import count_discarded
from models.base import Model
from tests.engine import hybrid
from tests.engine.harness import ScheduledJob, job, make_loop, run_one, run_schedule, tiny_model

CONTEXT, KEEP = 48, 8
PROMPT = tuple(b"a prompt of some length to begin with")
NONE = frozenset[int]()

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid, which cannot shift": hybrid.Model}


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


def shifted_greedy(model: Model, prompt: Sequence[int], count: int, keep: int) -> list[int]:
    """One id at a time; a full context loses the older half of what follows `keep`."""
    known, answer = list(prompt), list[int]()
    kv = model.make_kv()
    hidden = model(mx.array([known]), kv)
    while True:
        token = cast(int, mx.argmax(model.logits(hidden[:, -1])[0]).item())
        answer.append(token)
        if len(answer) == count:
            return answer
        if len(known) >= CONTEXT:
            discard = count_discarded(context=CONTEXT, length=len(known), num_keep=keep)
            known = known[:keep] + known[keep + discard :]
            if not model.shift(kv, keep, keep + discard):
                kv = model.make_kv()
                model(mx.array([known]), kv)
        known.append(token)
        hidden = model(mx.array([[token]]), kv)


@pytest.mark.parametrize("keep", [0, KEEP])
def test_an_answer_continues_past_its_context(model: Model, keep: int) -> None:
    loop = make_loop(model, running=2, policy="slots", context=CONTEXT, shift=True)
    request = job("long", PROMPT, max_tokens=100, stop_token_ids=NONE, num_keep=keep)
    outcome = run_one(loop, request)
    assert outcome.ids == shifted_greedy(model, PROMPT, 100, keep)
    assert (outcome.reason, len(outcome.progress)) == ("length", len(PROMPT) // 8 + 1)


def test_a_shift_does_not_affect_other_sequences(model: Model) -> None:
    loop = make_loop(model, running=3, policy="multi_user", context=CONTEXT, shift=True)
    short = job("short", PROMPT[:20], max_tokens=20, stop_token_ids=NONE)
    long = job("long", PROMPT, max_tokens=90, stop_token_ids=NONE, num_keep=KEEP)
    outcomes = run_schedule(loop, [ScheduledJob(job=long), ScheduledJob(job=short, at=12)])
    assert outcomes["short"].ids == run_one(make_loop(model), short).ids
    assert outcomes["long"].ids == shifted_greedy(model, PROMPT, 90, KEEP)


def test_shifted_keys_are_not_reused_for_an_unshifted_prompt(model: Model) -> None:
    """The remaining ids were computed after ids that are discarded now: a prompt of the same ids
    has different keys and values."""
    loop = make_loop(model, running=1, policy="slots", context=CONTEXT, shift=True)
    first = run_one(loop, job("long", PROMPT, max_tokens=40, stop_token_ids=NONE, num_keep=KEEP))
    left = [*PROMPT[:KEEP], *first.ids[-20:]]
    again = run_one(loop, job("again", left, stop_token_ids=NONE))
    assert again.cached <= KEEP
    assert again.ids == run_one(make_loop(model), job("again", left, stop_token_ids=NONE)).ids
