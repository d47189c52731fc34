"""Logprobs of prompt ids: the same numbers as from an evaluation one by one, for any chunk size,
any concurrent requests and any cache content."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import mlx.core as mx
import numpy as np
import pytest

from app.engine.loop import Loop
from app.engine.memory_profile import PROMPT_LOGPROBS_CHUNK, profile_memory
from app.engine.sampling.logprobs import PromptLogprob, compute_prompt_logprobs
from models.base import Model
from tests import tiny
from tests.engine import hybrid
from tests.engine.harness import (
    NEAR,
    ScheduledJob,
    job,
    make_loop,
    run,
    run_one,
    run_schedule,
    tiny_model,
)
from tests.rows import rows

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid": hybrid.Model}
PROMPT = tuple(b"what the model thinks of a prompt that is a little longer than a chunk")
TOP = 3


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


def score_one_by_one(model: Model, ids: Sequence[int], top: int = TOP) -> list[PromptLogprob]:
    """Each id evaluated alone, in float64 from the logits on."""
    kv, found = model.make_kv(), list[PromptLogprob]()
    for id, following in itertools.pairwise(ids):
        hidden = model(mx.array([[id]]), kv)
        logits = np.array(model.logits(hidden[:, -1])[0].astype(mx.float32), dtype=np.float64)
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        best = np.argsort(-logprobs, kind="stable")[:top]
        tops = tuple((int(i), float(logprobs[i])) for i in best)
        found.append((float(logprobs[following]), tops))
    return found


def assert_scores(got: Sequence[PromptLogprob] | None, expected: Sequence[PromptLogprob]) -> None:
    assert got is not None
    assert len(got) == len(expected)
    np.testing.assert_allclose([s for s, _ in got], [s for s, _ in expected], atol=NEAR)
    for (_, top), (_, expected_top) in zip(got, expected, strict=True):
        np.testing.assert_allclose([p for _, p in top], [p for _, p in expected_top], atol=NEAR)
        assert _is_sorted(top)


def _is_sorted(top: Sequence[tuple[int, float]]) -> bool:
    return all(a >= b for (_, a), (_, b) in itertools.pairwise(top))


@rows("chunk", [1, 7, 8, 9, 64, 512])
def test_scores_equal_those_computed_one_by_one(model: Model, chunk: int) -> None:
    outcome = run_one(make_loop(model, chunk=chunk), job("a", PROMPT, prompt_logprobs=TOP))
    assert_scores(outcome.scores, score_one_by_one(model, PROMPT))
    assert outcome.progress[-1] == len(PROMPT)


@pytest.mark.parametrize(
    "length", [1, 2, PROMPT_LOGPROBS_CHUNK, PROMPT_LOGPROBS_CHUNK + 1, PROMPT_LOGPROBS_CHUNK + 2]
)
def test_all_ids_but_the_first_have_a_score(length: int) -> None:
    model, ids = tiny_model(), PROMPT[:length]
    outcome = run_one(make_loop(model, chunk=64), job("a", ids, prompt_logprobs=0))
    assert_scores(outcome.scores, score_one_by_one(model, ids, top=0))


def test_scores_are_computed_only_on_request() -> None:
    assert run_one(make_loop(tiny_model()), job("a", PROMPT)).scores is None


def test_scoring_does_not_change_the_answer(model: Model) -> None:
    plain = run_one(make_loop(model), job("a", PROMPT))
    scored_too = run_one(make_loop(model), job("a", PROMPT, prompt_logprobs=TOP))
    assert scored_too.ids == plain.ids


@pytest.mark.parametrize("policy", ["single", "slots", "radix"])
def test_scoring_does_not_use_the_prefix_cache(model: Model, policy: str) -> None:
    loop = make_loop(model, policy=policy)
    run_one(loop, job("first", PROMPT))
    outcome = run_one(loop, job("scored", PROMPT, prompt_logprobs=TOP))
    assert outcome.cached == 0
    assert_scores(outcome.scores, score_one_by_one(model, PROMPT))


def test_a_scored_prompt_is_cached_for_others() -> None:
    loop = make_loop(tiny_model(), policy="radix")
    run_one(loop, job("scored", PROMPT, prompt_logprobs=TOP))
    assert run_one(loop, job("next", PROMPT)).cached == len(PROMPT) - 1


def test_other_requests_change_nothing(model: Model) -> None:
    """The same prompt several times, scored and not; a scored one does not wait for a prefix."""
    loop = make_loop(model, running=4, policy="radix", chunk=16)
    schedule = [
        ScheduledJob(job=job("a", PROMPT, prompt_logprobs=TOP)),
        ScheduledJob(job=job("plain", PROMPT, max_tokens=40), at=0),
        ScheduledJob(job=job("b", PROMPT, prompt_logprobs=TOP), at=1),
        ScheduledJob(job=job("c", PROMPT[::-1], prompt_logprobs=0), at=2),
    ]
    got = run_schedule(loop, schedule)
    expected = score_one_by_one(model, PROMPT)
    assert_scores(got["a"].scores, expected)
    assert_scores(got["b"].scores, expected)
    assert_scores(got["c"].scores, score_one_by_one(model, PROMPT[::-1], top=0))
    assert got["plain"].scores is None


@pytest.mark.parametrize("after", [1, 3, 6])
def test_a_cancelled_job_does_not_affect_the_next_one(model: Model, after: int) -> None:
    loop = make_loop(model, policy="radix")
    gone = run(loop, job("gone", PROMPT, prompt_logprobs=TOP), cancel_after=after)["gone"]
    assert (gone.reason, gone.scores) == ("cancelled", None)
    again = run_one(loop, job("again", PROMPT, prompt_logprobs=TOP))
    assert_scores(again.scores, score_one_by_one(model, PROMPT))


def test_a_preempted_prompt_is_scored_once(model: Model) -> None:
    """Preempted in its prompt, by an older sequence that grows, and again in its answer; `Outcome`
    rejects a second report."""
    memory = profile_memory(
        model, budget=0, weights=0, chunk=8, max_batch_size=1, heads=0, context=512
    )
    loop = make_loop(
        model, running=2, policy="radix", chunk=8, budget=2 * memory.kv_footprint(512), context=1024
    )
    young = bytes(i % 251 for i in range(400))
    got = run_schedule(
        loop,
        [
            ScheduledJob(job=job("old", [1] * 200, max_tokens=400, stop_token_ids=frozenset())),
            ScheduledJob(
                job=job("young", young, prompt_logprobs=TOP, stop_token_ids=frozenset()), at=300
            ),
        ],
    )
    assert loop.stats().preemptions > 0
    assert_scores(got["young"].scores, score_one_by_one(model, young))
    assert len(got["young"].tokens) == 12


def test_a_request_preempted_after_its_prompt_is_scored_once() -> None:
    model = tiny_model()
    memory = profile_memory(
        model, budget=0, weights=0, chunk=8, max_batch_size=1, heads=0, context=512
    )
    loop = make_loop(
        model,
        running=3,
        policy="radix",
        chunk=64,
        budget=2 * memory.kv_footprint(512),
        context=1024,
    )
    jobs = [
        job(str(i), bytes([i] * 200), max_tokens=350, stop_token_ids=frozenset(), prompt_logprobs=0)
        for i in range(3)
    ]
    got = run_schedule(loop, [ScheduledJob(job=one) for one in jobs])
    stats = loop.stats()
    assert stats.preemptions > 0
    for one in jobs:
        assert_scores(got[one.id].scores, score_one_by_one(model, one.prompt_token_ids, top=0))


def test_a_prompt_with_a_context_shift_is_scored_once(model: Model) -> None:
    loop = make_loop(model, policy="slots", context=48, shift=True)
    ids = PROMPT[:30]
    outcome = run_one(
        loop, job("a", ids, max_tokens=90, stop_token_ids=frozenset(), prompt_logprobs=TOP)
    )
    assert_scores(outcome.scores, score_one_by_one(model, ids))
    assert len(outcome.tokens) == 90


def test_logits_are_computed_for_few_positions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a chunk can be as large as a model; memory is reserved for
    `PROMPT_LOGPROBS_CHUNK` rows."""
    model, rows = tiny_model(), list[int]()
    logits = model.logits

    def record(hidden: mx.array) -> mx.array:
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(model, "logits", record)
    run_one(make_loop(model, chunk=512), job("a", PROMPT, prompt_logprobs=TOP, max_tokens=1))
    assert max(rows) == PROMPT_LOGPROBS_CHUNK
    # one to measure the memory, and one for each position; the last one is sampled from
    assert sum(rows) == 1 + len(PROMPT)


def test_an_id_that_cannot_be_sampled_has_no_probability() -> None:
    model, ids = tiny_model(), [5, 250, 6]
    hidden = model(mx.array([ids]), model.make_kv())[0]
    got = compute_prompt_logprobs(model, hidden[:-1], ids[1:], vocab=200, count=300)
    assert got[0][0] == -math.inf
    assert math.isfinite(got[1][0])
    assert all(len(top) == 200 for _, top in got)
    assert sum(math.exp(p) for _, p in got[1][1]) == pytest.approx(1, abs=1e-5)


def test_nan_scores_are_an_error() -> None:
    """The embedding of one id in the middle of the prompt is NaN."""
    model = cast(Any, tiny_model())
    model.model.embed_tokens.weight[5] = mx.array([math.nan] * tiny.CONFIG["hidden_size"])
    window: Any = Windowless(model)
    outcome = run_one(make_loop(window), job("a", [1, 5, *[2] * 20], prompt_logprobs=0))
    assert (outcome.reason, outcome.scores) == ("error", None)
    assert "NaN or infinite logits" in (outcome.error or "")


class Windowless:
    """A model whose positions do not see each other, so that NaN does not spread."""

    batch_invariant: ClassVar[bool] = False
    selects_logits: ClassVar[bool] = False
    image_rules: ClassVar[None] = None

    def __init__(self, model: Any) -> None:
        self._model = model
        self.logits, self.make_kv = model.logits, model.make_kv

    def __call__(self, tokens: mx.array, kv: Any) -> mx.array:
        hidden = self._model(mx.where(tokens == 5, 0, tokens), kv)
        return mx.where((tokens == 5)[..., None], mx.array(math.nan), hidden)


def test_a_repeated_prompt_is_scored_again() -> None:
    loop: Loop = make_loop(tiny_model())
    first = run_one(loop, job("a", PROMPT, prompt_logprobs=1))
    second = run_one(loop, job("a", PROMPT, prompt_logprobs=1))
    assert first.scores == second.scores
