"""Driving a Loop by hand, and comparing what two runs gave."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np

import models
from app.core.jobs import Ended, Job, Prefilled, Started, Token
from app.core.requests import Sampling
from app.engine.loop import Loop
from app.engine.prefix.single import SinglePrefixCache
from app.engine.scheduler import Limits
from models.base import Model
from models.kv import LayerCache
from tests import tiny

# two logits closer than this may change places between equally right computations
NEAR = 1e-4
TOP = 5


@dataclass(kw_only=True)
class Outcome:
    """What a loop said of one job."""

    cached: int = -1
    progress: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    reason: str = ""
    error: str | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def tiny_model(seed: int = 0) -> Model:
    return models.build(tiny.CONFIG, tiny.weights(seed=seed))


def make_loop(
    model: Model, *, running: int = 1, chunk: int = 8, grid: int = 1, exact: bool = False
) -> Loop:
    return Loop(
        model,
        SinglePrefixCache[LayerCache](model.make_kv, grid=grid),
        vocab=tiny.VOCAB,
        limits=Limits(running=running, prefill=chunk),
        exact=exact,
    )


def job(name: str, ids: Sequence[int], **changes: Any) -> Job:
    """A greedy job of 12 tokens with logprobs, unless told otherwise. Sampling fields go to
    Sampling, others to Job."""
    knobs = {k: changes.pop(k) for k in list(changes) if k in Sampling.__dataclass_fields__}
    fields: dict[str, Any] = {
        "max_tokens": 12,
        "stop_ids": frozenset({tiny.END}),
        "top_logprobs": TOP,
        **changes,
    }
    sampling = Sampling(**{"temperature": 0.0, **knobs})
    return Job(id=name, ids=tuple(ids), sampling=sampling, **fields)


def run(loop: Loop, *jobs: Job, cancel_after: int | None = None) -> dict[str, Outcome]:
    """Submit and step until nothing runs. cancel_after: cancel all of them after so many steps."""
    outcomes = {job.id: Outcome() for job in jobs}
    for one in jobs:
        loop.submit(one)
    steps = 0
    while not loop.idle:
        if steps == cancel_after:
            for one in jobs:
                loop.cancel(one.id)
        for update in loop.step().updates:
            _note(outcomes[update.job], update)
        steps += 1
        assert steps < 5000
    loop.check()
    return outcomes


def run_one(loop: Loop, one: Job, cancel_after: int | None = None) -> Outcome:
    return run(loop, one, cancel_after=cancel_after)[one.id]


def _note(outcome: Outcome, update: Any) -> None:
    assert outcome.reason == "", "nothing may follow the end"
    match update:
        case Started():
            outcome.cached = update.cached
        case Prefilled():
            assert not outcome.tokens
            outcome.progress.append(update.done)
        case Token():
            outcome.tokens.append(update)
        case Ended():
            outcome.reason, outcome.error = update.reason, update.error


def near_tie(a: Token, b: Token) -> bool:
    """Whether the two runs differ at this step only because their best candidates all but tie."""
    return all(t.top[0][1] - t.top[1][1] < NEAR for t in (a, b))


def assert_same(a: Outcome, b: Outcome) -> int:
    """Equal tokens and logprobs to 1e-4, up to the first near-tie; how many of those there were."""
    for x, y in zip(a.tokens, b.tokens, strict=False):
        if x.id != y.id:
            assert near_tie(x, y), f"{x} is not {y}"
            return 1
        assert x.logprob is not None
        assert y.logprob is not None
        np.testing.assert_allclose(x.logprob, y.logprob, atol=NEAR)
        np.testing.assert_allclose([v for _, v in x.top], [v for _, v in y.top], atol=NEAR)
    assert (len(a.tokens), a.reason) == (len(b.tokens), b.reason)
    return 0


def greedy(model: Model, ids: Sequence[int], count: int) -> list[int]:
    """The plainest generation there is: the whole sequence again for every token."""
    known = list(ids)
    for _ in range(count):
        hidden = model(mx.array([known]), model.make_kv())
        known.append(cast(int, mx.argmax(model.logits(hidden[:, -1])[0]).item()))
    return known[len(ids) :]
