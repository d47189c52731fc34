"""A failing step ends only the requests it belongs to, and the loop continues."""

from typing import Any

import mlx.core as mx
import pytest

from app.engine.kv_layout import SlabPolicy
from app.engine.loop import Loop
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

PROMPT = tuple(b"the quick brown fox jumps over the lazy dog")
POISON = 13
LAYOUTS = {
    "rows": SlabPolicy(layout="rows"),
    "slab": SlabPolicy(layout="slab", min_rows=2, join_padding=9, stay_padding=9),
}
NONE = frozenset[int]()


class Broken(hybrid.Model):
    """Fails in the middle of a forward pass, after some layers were written, when any row contains
    the poison."""

    def __call__(self, tokens: Any, kv: Any) -> Any:
        if any(POISON in row for row in tokens.tolist()):
            super().__call__(tokens, [*kv[:1], *(_Failing() for _ in kv[1:])])
        return super().__call__(tokens, kv)


class _Failing:
    offset = 0

    def __getattr__(self, _: str) -> Any:
        raise RuntimeError("planted")


class Unsound(hybrid.Model):
    """Logits are NaN for a row whose last id is the poison."""

    def __call__(self, tokens: Any, kv: Any) -> Any:
        bad = mx.any(tokens == POISON, axis=1)[:, None, None]
        return mx.where(bad, mx.nan, super().__call__(tokens, kv))


def poison_job(name: str) -> Any:
    """A job whose first token is the poison, because of a large bias."""
    return job(name, PROMPT, logit_bias=((POISON, 1e4),), stop_token_ids=NONE)


def good_job(name: str, **changes: Any) -> Any:
    bias = {"logit_bias": ((POISON, -1e4),), "stop_token_ids": NONE}
    return job(name, [*PROMPT, *name.encode()], **bias | changes)


@pytest.mark.parametrize("kinds", ["kk", "kwr"])
@pytest.mark.parametrize("policy", ["radix", "slots", "single"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_that_breaks_a_batch_ends_alone(
    kinds: str, policy: str, layout: str, ties: list[int]
) -> None:
    """The others lose their caches too, restart, and give the same answers as without it."""
    model = Broken(kinds=kinds)
    running = 1 if policy == "single" else 4
    loop = make_loop(model, running=running, policy=policy, slab_policy=LAYOUTS[layout])
    names = [good_job(str(i), temperature=0.9, seed=i, presence_penalty=0.5) for i in range(3)]
    outcomes = run_schedule(
        loop,
        [
            *(ScheduledJob(job=one, at=i) for i, one in enumerate(names)),
            ScheduledJob(job=poison_job("bad"), at=6),
        ],
    )
    assert outcomes["bad"].reason == "error"
    for one in names:
        ties.append(assert_same(outcomes[one.id], run_one(make_loop(model), one)))
    assert loop.stats().failures == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_with_nan_logits_ends_alone(layout: str, ties: list[int]) -> None:
    """The other rows keep their draws and counts."""
    model = Unsound()
    loop = make_loop(model, running=3, policy="radix", slab_policy=LAYOUTS[layout])
    others = [
        good_job("one", temperature=1.0, seed=1, frequency_penalty=1.0),
        good_job("two", repetition_penalty=1.5, repeat_last_n=6),
    ]
    outcomes = run_schedule(
        loop,
        [*(ScheduledJob(job=one) for one in others), ScheduledJob(job=poison_job("bad"), at=2)],
    )
    assert outcomes["bad"].reason == "error"
    assert "NaN or infinite logits" in (outcomes["bad"].error or "")
    for one in others:
        ties.append(assert_same(outcomes[one.id], run_one(make_loop(model), one)))


def test_caches_of_a_failed_step_are_not_reused() -> None:
    model = Broken(kinds="kk")
    loop = make_loop(model, running=2, policy="radix")
    assert run_one(loop, job("bad", [*PROMPT, POISON])).reason == "error"
    after = run_one(loop, good_job("good"))
    assert after.cached <= len(PROMPT)
    assert after.ids == run_one(make_loop(model), good_job("good")).ids


def test_an_error_in_the_prefix_cache_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = make_loop(tiny_model(), running=2, policy="radix")
    cache: Any = _prefix_of(loop)
    begin = cache.begin

    def fail(ids: Any, **options: Any) -> Any:
        if POISON in ids:
            raise RuntimeError("planted")
        return begin(ids, **options)

    monkeypatch.setattr(cache, "begin", fail)
    outcomes = run_schedule(
        loop,
        [
            ScheduledJob(job=good_job("a")),
            ScheduledJob(job=job("bad", [POISON])),
            ScheduledJob(job=good_job("b")),
        ],
    )
    assert [outcomes[name].reason for name in ("a", "bad", "b")] == ["length", "error", "length"]


def test_a_failed_eviction_ends_only_the_request_that_needed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop does not repeat a failing step for ever."""
    model = tiny_model()
    sequence_bytes = make_loop(model, context=256).capacity.kv_bytes_per_sequence
    loop = make_loop(model, running=2, policy="radix", context=256, budget=2 * sequence_bytes)
    assert run_one(loop, good_job("first")).reason == "length"

    def fail(count: int) -> int:
        raise RuntimeError("planted")

    monkeypatch.setattr(_prefix_of(loop), "evict", fail)
    pair = [ScheduledJob(job=good_job("second")), ScheduledJob(job=job("third", [1] * 200))]
    outcomes = run_schedule(loop, pair)
    assert sorted(outcome.reason for outcome in outcomes.values()) == ["error", "length"]


def test_an_error_for_a_batch_ends_no_request_that_succeeds_alone(
    monkeypatch: pytest.MonkeyPatch, ties: list[int]
) -> None:
    """Some errors (of an allocation, say) occur only for a batch: each row succeeds alone."""
    model = tiny_model()
    logits, failed = model.logits, []

    def fail_once(hidden: mx.array) -> mx.array:
        if hidden.shape[0] == 3 and not failed:
            failed.append(1)
            raise RuntimeError("planted")
        return logits(hidden)

    loop = make_loop(model, running=3, policy="radix")
    monkeypatch.setattr(model, "logits", fail_once)
    jobs = [
        good_job(str(i), temperature=1.0, seed=i, frequency_penalty=0.7, max_tokens=40)
        for i in range(3)
    ]
    outcomes = run_schedule(loop, [ScheduledJob(job=one) for one in jobs])
    assert failed
    monkeypatch.undo()
    for one in jobs:
        ties.append(assert_same(outcomes[one.id], run_one(make_loop(model), one)))


def _prefix_of(loop: Loop) -> Any:
    return loop._scheduler._prefix  # pyright: ignore[reportPrivateUsage]  # to plant a fault in it
