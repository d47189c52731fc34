"""A failing step ends only the requests it belongs to, and the loop continues."""

from collections.abc import Callable, Container
from typing import Any

import mlx.core as mx
import pytest

from app.core.jobs import Ended
from app.engine.decode_slab import DecodeSlab, SlabPolicy
from app.engine.loop import Loop
from app.engine.sequence import Sequence
from models.base import select_all
from tests.engine import harness, hybrid
from tests.engine.harness import (
    ScheduledJob,
    assert_same,
    job,
    make_loop,
    run_one,
    run_schedule,
    tiny_model,
)
from tests.engine.test_preemption import LONG, footprint

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

    def __call__(self, tokens: Any, kv: Any, select: Any = select_all, images: Any = None) -> Any:
        if any(POISON in row for row in tokens.tolist()):
            super().__call__(tokens, [*kv[:1], *(_Failing() for _ in kv[1:])])
        return super().__call__(tokens, kv, select, images)


class _Failing:
    offset = 0

    def __getattr__(self, _: str) -> Any:
        raise RuntimeError("planted")


class Unsound(hybrid.Model):
    """Logits are NaN for a row whose last id is the poison."""

    def __call__(self, tokens: Any, kv: Any, select: Any = select_all, images: Any = None) -> Any:
        bad = mx.any(tokens == POISON, axis=1)[:, None, None]
        return select(mx.where(bad, mx.nan, super().__call__(tokens, kv, images=images)))


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
    """The loop does not repeat a failing step forever."""
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


class FailingCopies:
    """Makes copies fail that sequences make when they give their caches back, or, with
    `everywhere`, all copies. failing: the numbers of these copies, from 0. Loops must be created
    afterwards."""

    def __init__(
        self, patch: pytest.MonkeyPatch, failing: Container[int], *, everywhere: bool = False
    ) -> None:
        self.num_failed = 0
        self._failing = failing
        self._num_copies = 0
        self._ending = everywhere
        for owner, name in (
            (harness, "evaluate_caches"),
            (harness, "dispatch_caches"),
            (DecodeSlab, "settle"),
        ):
            patch.setattr(owner, name, self._fail(getattr(owner, name)))
        for name in ("commit", "discard"):
            patch.setattr(Sequence, name, self._end(getattr(Sequence, name)))

    def _fail(self, copy: Callable[..., None]) -> Callable[..., None]:
        def fail(*args: Any) -> None:
            if self._ending:
                self._num_copies += 1
                if self._num_copies - 1 in self._failing:
                    self.num_failed += 1
                    raise RuntimeError("[malloc] Unable to allocate 1073741824 bytes.")
            copy(*args)

        return fail

    def _end(self, method: Callable[..., None]) -> Callable[..., None]:
        def end(*args: Any, **options: Any) -> None:
            before, self._ending = self._ending, True
            try:
                method(*args, **options)
            finally:
                self._ending = before

        return end


@pytest.mark.parametrize("policy", ["radix", "slots"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failed_copy_at_the_end_of_a_request_costs_only_cached_tokens(
    layout: str, policy: str, ties: list[int]
) -> None:
    """The request used to hang, because its end was not reported, and all others were aborted. A
    cancel raised the error, which ended the engine."""
    model = Unsound(kinds="kwr")
    jobs = [good_job("short", max_tokens=5), good_job("long", temperature=0.9, seed=1)]
    again = [good_job(f"{one.id} again", max_tokens=5) for one in jobs]
    alone = {one.id: run_one(make_loop(model), one) for one in (*jobs, *again)}
    num_failed, number = 0, -1
    while num_failed > number:
        number += 1
        with pytest.MonkeyPatch.context() as patch:
            copies = FailingCopies(patch, {number})
            loop = make_loop(model, running=4, policy=policy, slab_policy=LAYOUTS[layout])
            outcomes = run_schedule(
                loop,
                [
                    *(ScheduledJob(job=one) for one in jobs),
                    ScheduledJob(job=good_job("left"), cancelled_at=10),
                    ScheduledJob(job=poison_job("bad"), at=2),
                ],
            )
            outcomes |= run_schedule(loop, [ScheduledJob(job=one) for one in again])
        num_failed += copies.num_failed
        assert loop.exceptions == copies.num_failed
        assert loop.stats().ledger.kv == 0
        assert outcomes["left"].reason == "cancelled"
        assert outcomes["bad"].reason == "error"
        assert loop.stats().failures == 1
        for name, expected in alone.items():
            ties.append(assert_same(outcomes[name], expected))
    assert num_failed > 0


@pytest.mark.parametrize("policy", ["radix", "multi_user"])
def test_every_request_ends_when_any_copy_of_cached_tensors_fails(policy: str) -> None:
    """Whichever copy fails, at most the request that needs it does, and a request that is finished
    or cancelled only loses its cached prefix."""
    shared = PROMPT[:20]
    jobs = [
        ScheduledJob(job=job("first", shared, max_tokens=4, stop_token_ids=NONE)),
        ScheduledJob(job=job("long", PROMPT, max_tokens=30, stop_token_ids=NONE)),
        ScheduledJob(job=job("cancelled", [*shared, 1], stop_token_ids=NONE), at=3, cancelled_at=8),
        ScheduledJob(job=job("again", [*shared, 2, 3], stop_token_ids=NONE), at=10),
    ]
    expected = run_schedule(make_loop(tiny_model(), running=4, chunk=16, policy=policy), jobs)
    num_failed, number = 0, -1
    while num_failed > number:
        number += 1
        with pytest.MonkeyPatch.context() as patch:
            copies = FailingCopies(patch, {number}, everywhere=True)
            loop = make_loop(tiny_model(), running=4, chunk=16, policy=policy)
            outcomes = run_schedule(loop, jobs)
        num_failed += copies.num_failed
        assert loop.idle
        failed = [name for name, outcome in outcomes.items() if outcome.reason == "error"]
        assert len(failed) <= 1
        for name, outcome in outcomes.items():
            if name not in failed:
                assert outcome.reason == expected[name].reason != ""
                assert_same(outcome, expected[name])
    assert num_failed > 2


def test_a_preempted_request_continues_if_its_caches_cannot_be_stored(
    monkeypatch: pytest.MonkeyPatch, ties: list[int]
) -> None:
    model = tiny_model()
    jobs = [
        job(str(i), [i] * 250, max_tokens=LONG, stop_token_ids=NONE, temperature=0.8, seed=i)
        for i in range(2)
    ]
    budget = 2 * footprint(model, 512)
    loop = make_loop(model, running=2, policy="radix", chunk=64, budget=budget, context=1024)
    cache: Any = _prefix_of(loop)

    def fail(store: Any, *_: object, **__: object) -> None:
        cache.discard(store)
        raise RuntimeError("planted")

    monkeypatch.setattr(cache, "store_prefix", fail)
    outcomes = run_schedule(loop, [ScheduledJob(job=one) for one in jobs])
    assert loop.stats().preemptions > 0
    assert loop.exceptions == len(jobs) + loop.stats().preemptions
    for one in jobs:
        ties.append(assert_same(outcomes[one.id], run_one(make_loop(model), one)))


def test_caches_that_cannot_be_dropped_cleanly_end_no_other_request(
    monkeypatch: pytest.MonkeyPatch, ties: list[int]
) -> None:
    """A discard can also fail: another store of the prefix cache shrinks, which copies it."""
    model = Broken(kinds="kk")
    loop = make_loop(model, running=3, policy="radix")
    cache: Any = _prefix_of(loop)
    discard = cache.discard

    def fail(store: Any) -> None:
        discard(store)
        raise RuntimeError("planted")

    monkeypatch.setattr(cache, "discard", fail)
    jobs = [good_job(str(i), temperature=0.9, seed=i) for i in range(2)]
    outcomes = run_schedule(
        loop,
        [*(ScheduledJob(job=one) for one in jobs), ScheduledJob(job=poison_job("bad"), at=4)],
    )
    assert outcomes["bad"].reason == "error"
    for one in jobs:
        ties.append(assert_same(outcomes[one.id], run_one(make_loop(model), one)))


def test_an_eviction_that_fails_between_two_steps_is_not_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error after the step used to end the engine."""
    loop = make_loop(tiny_model(), policy="radix")
    budget: Any = loop._scheduler._budget  # pyright: ignore[reportPrivateUsage]  # to plant a fault

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(budget, "enforce_rules", fail)
    monkeypatch.setattr(budget, "maintain", fail)
    loop.submit(good_job("a"))
    assert any(update.job_id == "a" for update in loop.step().updates)
    assert loop.maintain_memory(0.0)
    assert loop.exceptions == 2


def test_a_violated_assertion_at_the_end_of_a_request_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of the request is still reported."""
    loop = make_loop(tiny_model(), policy="radix")
    loop.submit(good_job("a"))
    loop.step()

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr(_prefix_of(loop), "store_prefix", fail)
    with pytest.raises(AssertionError, match="planted"):
        loop.cancel("a")
    (end,) = [update for update in loop.step().updates if isinstance(update, Ended)]
    assert end.reason == "cancelled"


def _prefix_of(loop: Loop) -> Any:
    return loop._scheduler._prefix  # pyright: ignore[reportPrivateUsage]  # to plant a fault in it
