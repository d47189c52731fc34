"""The generation loop: results never depend on earlier or concurrent requests."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from app.core.jobs import Ended, Token
from app.core.requests import JsonSchema
from app.engine.loop import Loop
from app.engine.model_runner import ModelRunner, PrefillChunk
from models.base import Model, select_all
from tests import tiny
from tests.engine import hybrid
from tests.engine.harness import (
    assert_same,
    greedy,
    job,
    make_loop,
    run,
    run_one,
    submit,
    tiny_model,
    token_bits,
)

MODELS: dict[str, Any] = {
    "llama": tiny_model,
    "hybrid": hybrid.Model,
    "windowed": lambda: hybrid.Model(kinds="kw"),
}

PROMPT = tuple(b"the quick brown fox jumps over the lazy dog")

Ids = st.lists(st.integers(0, 255), min_size=1, max_size=40)


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


def test_greedy_tokens_equal_those_of_the_reference(model: Model) -> None:
    outcome = run_one(make_loop(model), job("a", PROMPT, stop_token_ids=frozenset[int]()))
    assert outcome.ids == greedy(model, PROMPT, 12)
    assert (outcome.reason, outcome.cached) == ("length", 0)


def test_progress_counts_the_prompt_chunk_by_chunk() -> None:
    outcome = run_one(make_loop(tiny_model(), chunk=16), job("a", PROMPT))
    assert outcome.progress == [16, 32, len(PROMPT)]


def test_an_end_of_sequence_id_ends_the_answer_and_is_not_part_of_it() -> None:
    full = run_one(make_loop(tiny_model()), job("a", PROMPT)).ids
    stop = next(i for i, token in enumerate(full) if token not in full[:i] and i > 2)
    outcome = run_one(
        make_loop(tiny_model()), job("a", PROMPT, stop_token_ids=frozenset({full[stop]}))
    )
    assert (outcome.ids, outcome.reason) == (full[:stop], "stop")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_answer_ends_at_its_limit(count: int) -> None:
    outcome = run_one(make_loop(tiny_model()), job("a", PROMPT, max_tokens=count))
    assert (len(outcome.ids), outcome.reason) == (count, "length")


def test_a_prompt_of_one_token_is_answered(model: Model) -> None:
    assert run_one(make_loop(model), job("a", [7])).ids == greedy(model, [7], 12)


@pytest.mark.product
@examples(max_examples=40)
@given(
    prompts=st.lists(
        st.tuples(Ids, st.integers(0, 40), st.none() | st.integers(0, 12)), max_size=4
    ),
    final=Ids,
    shared=st.integers(0, 40),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_cached_equals_uncached_after_any_history(
    model: Model, ties: list[int], prompts: Any, final: list[int], shared: int, temperature: float
) -> None:
    """Any history of prompts with common prefixes, finished or cancelled at any step."""
    loop, previous = make_loop(model), list(PROMPT)
    for i, (ids, keep, cancel_after) in enumerate(prompts):
        previous = previous[:keep] + ids
        run_one(loop, job(f"before {i}", previous), cancel_after)
    request = job("it", previous[:shared] + final, temperature=temperature, seed=7)
    warm, cold = run_one(loop, request), run_one(make_loop(model), request)
    assert cold.cached == 0
    assert warm.cached < len(request.prompt_token_ids)
    ties.append(assert_same(warm, cold))


@pytest.mark.parametrize("cancel_after", range(12))
def test_the_work_of_a_cancelled_job_stays_cached(cancel_after: int, ties: list[int]) -> None:
    model = tiny_model()
    loop = make_loop(model, chunk=8)
    cancelled = run_one(loop, job("a", PROMPT), cancel_after)
    again = run_one(loop, job("b", PROMPT))
    assert cancelled.reason == "cancelled"
    assert again.cached >= max(cancelled.progress, default=0) - 1
    ties.append(assert_same(again, run_one(make_loop(model), job("b", PROMPT))))


def test_a_cancelled_prefill_ends_within_one_chunk() -> None:
    loop = make_loop(tiny_model(), chunk=4)
    loop.submit(job("a", PROMPT))
    for _ in range(3):
        loop.step()
    done = loop.stats().prefilled_tokens
    loop.cancel("a")
    loop.submit(job("b", b"another"))
    loop.step()
    assert loop.stats().prefilled_tokens <= done + 4
    assert loop.stats().running == 1


def test_a_waiting_job_can_be_cancelled_and_an_unknown_one_ignored() -> None:
    loop = make_loop(tiny_model())
    outcomes = run(loop, job("a", PROMPT), job("b", PROMPT), cancel_after=0)
    assert [o.reason for o in outcomes.values()] == ["cancelled", "cancelled"]
    loop.cancel("unknown")
    assert loop.idle


def test_a_repeated_prompt_is_served_from_the_cache() -> None:
    loop = make_loop(tiny_model())
    run_one(loop, job("a", PROMPT))
    before = loop.stats()
    again = run_one(loop, job("b", PROMPT))
    after = loop.stats()
    assert again.cached == len(PROMPT) - 1
    assert after.prefilled_tokens - before.prefilled_tokens == 1
    assert after.cached_tokens - before.cached_tokens == len(PROMPT) - 1


def test_the_next_turn_of_a_conversation_reuses_prompt_and_answer(model: Model) -> None:
    loop = make_loop(model)
    first = run_one(loop, job("a", PROMPT))
    turn = [*PROMPT, *first.ids, *b"and then?"]
    # the last token of an answer cut by its limit was never evaluated
    assert run_one(loop, job("b", turn)).cached == len(PROMPT) + len(first.ids) - 1


def test_keep_trims_the_cache_to_the_tokens_that_the_client_got() -> None:
    loop = make_loop(tiny_model(), chunk=64)
    loop.submit(job("a", PROMPT))
    for _ in range(8):
        loop.step()
    loop.cancel("a", keep=3)
    loop.step()
    ids = greedy(tiny_model(), PROMPT, 8)
    outcome = run_one(loop, job("b", [*PROMPT, *ids]))
    assert outcome.cached == len(PROMPT) + 3


REQUESTS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2},
    {"temperature": 0.7, "top_k": 5, "seed": 3},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "seed": 4},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 2.0, "repeat_last_n": 5},
    {"frequency_penalty": 1.5, "temperature": 1.0, "seed": 5},
    {"logit_bias": ((65, 12.0), (66, -100.0))},
    {"top_logprobs": None},
]


@pytest.mark.product
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("running", [1, 3, len(REQUESTS)])
def test_requests_never_affect_each_other(
    model: Model, ties: list[int], running: int, order: int
) -> None:
    """Each request alone on a fresh engine, against all of them on one, at most `running` at
    once, in either order. Other servers lose penalties after a plain request or sample with the
    parameters of the batch's first row."""
    jobs = [job(str(i), PROMPT[i:], **request) for i, request in enumerate(REQUESTS)]
    together = run(make_loop(model, running=running, policy="slots"), *jobs[::order])
    for one in jobs:
        alone = run_one(make_loop(model), one)
        if one.top_logprobs is None:
            assert together[one.id].ids == alone.ids
        else:
            ties.append(assert_same(together[one.id], alone))


@pytest.mark.parametrize(("policy", "times"), [("radix", 1), ("multi_user", 1), ("slots", 3)])
def test_a_shared_prefix_is_computed_once(policy: str, times: int) -> None:
    """Three clients send one long system prompt at the same time: two wait until the first has
    computed it, if the cache can lend it; otherwise they do not wait."""
    model = tiny_model()
    shared = list(PROMPT) * 3
    loop = make_loop(model, running=3, policy=policy, chunk=16)
    jobs = [job(str(i), [*shared, i, i, i], max_tokens=4) for i in range(3)]
    outcomes = run(loop, *jobs)
    for one in jobs:
        assert outcomes[one.id].ids == run_one(make_loop(model), one).ids
    evaluated = loop.stats().prefilled_tokens
    assert times * len(shared) <= evaluated <= times * len(shared) + 3 * 16


def test_each_parameter_changes_the_answer() -> None:
    """Without this the test above could not fail."""
    plain = run_one(make_loop(tiny_model()), job("a", PROMPT)).ids
    for request in REQUESTS[1:-1]:
        assert run_one(make_loop(tiny_model()), job("a", PROMPT, **request)).ids != plain, request


def test_unseeded_requests_differ() -> None:
    loop = make_loop(tiny_model())
    answers = {tuple(run_one(loop, job("a", PROMPT, temperature=2.0)).ids) for _ in range(4)}
    assert len(answers) == 4


def test_logprobs_are_those_of_the_raw_logits() -> None:
    request = job("a", PROMPT, repetition_penalty=3.0, temperature=1.0, top_k=1, seed=1)
    for token in run_one(make_loop(tiny_model()), request).tokens:
        assert token.logprob is not None
        assert len(token.top_logprobs) == 5
        values = [value for _, value in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert token.logprob <= values[0]
        assert dict(token.top_logprobs).get(token.id, token.logprob) == token.logprob


class Broken(hybrid.Model):
    """Fails when it meets id 13."""

    def __call__(self, tokens: Any, kv: Any, select: Any = select_all, images: Any = None) -> Any:
        if any(13 in row for row in tokens.tolist()):
            raise RuntimeError("planted")
        return super().__call__(tokens, kv, select, images)


def test_a_failing_step_ends_its_job_and_the_engine_continues() -> None:
    model = Broken(kinds="k")
    loop = make_loop(model)
    good = job("good", PROMPT, max_tokens=3, logit_bias=((13, -100.0),))
    assert run_one(loop, good).reason == "length"
    failed = run_one(loop, job("bad", [*PROMPT, 13]))
    assert (failed.reason, failed.error) == (
        "error",
        "the engine failed while processing this request",
    )
    after = run_one(loop, good)
    assert after.reason == "length"
    assert after.cached == 0, "caches of a failed step must not be reused"


def test_a_failing_job_does_not_affect_the_others() -> None:
    model = Broken(kinds="k")
    good = job("good", PROMPT, logit_bias=((13, -100.0),), stop_token_ids=frozenset[int]())
    alone = run_one(make_loop(model), good)
    together = run(
        make_loop(model, running=3, policy="slots"),
        good,
        job("bad", [*PROMPT, 13]),
        job("unstartable", []),
    )
    assert [together[name].reason for name in ("bad", "unstartable")] == ["error", "error"]
    assert together["good"].ids == alone.ids


def test_exact_mode_is_bitwise_reproducible() -> None:
    """With alignment, positions are computed in the same shapes, cached or not."""
    model = tiny_model()

    def exact() -> Loop:
        return make_loop(model, chunk=8, exact=True)

    loop = exact()
    first = run_one(loop, job("a", PROMPT))
    turn = [*PROMPT, *first.ids, *b"and then?"]
    warm, cold = run_one(loop, job("b", turn)), run_one(exact(), job("b", turn))
    assert warm.cached == len(PROMPT) // 8 * 8
    assert token_bits(warm) == token_bits(cold)


def test_memory_does_not_grow_from_request_to_request() -> None:
    loop = make_loop(tiny_model())
    for _ in range(3):
        run_one(loop, job("a", PROMPT * 20, max_tokens=4))
    before = loop.stats().allocated_bytes
    for _ in range(20):
        run_one(loop, job("a", PROMPT * 20, max_tokens=4))
    assert loop.stats().allocated_bytes <= before * 1.02
    assert loop.stats().ledger.prefix > 0


def test_the_end_names_the_token_that_stopped_the_output() -> None:
    loop = make_loop(tiny_model())
    loop.submit(job("a", PROMPT, logit_bias=((7, 1000.0),), stop_token_ids=frozenset({7})))
    while not (ended := [u for u in loop.step().updates if isinstance(u, Ended)]):
        pass
    assert ended[0].stop_token_id == 7


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("policy", ["radix", "slots"])
def test_tokens_are_posted_before_a_prompt_chunk_is_dispatched(
    policy: str, grammar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX blocks in `async_eval` for most of a chunk. Tokens that were sampled before the chunk
    used to be posted after it, up to two chunks late."""
    loop = make_loop(tiny_model(), running=3, chunk=8, policy=policy)
    bias = ((tiny.END, -100.0),)
    for i in range(2):
        changes: dict[str, Any] = {"max_tokens": 100, "logit_bias": bias}
        if grammar and i:
            changes["grammar"] = JsonSchema(text='{"type": "string", "minLength": 200}')
        submit(loop, job(f"stream {i}", [*PROMPT, i], **changes))
    for _ in range(20):
        loop.step()
    sampled, posted, chunks = 0, 0, 0
    sample, dispatch = ModelRunner.sample, PrefillChunk.dispatch

    def count_sample(self: ModelRunner, batch: Any) -> Any:
        nonlocal sampled
        sampled += sum(s.job.id.startswith("stream") for s in batch.sequences)
        return sample(self, batch)

    def check_posted(self: PrefillChunk) -> Any:
        nonlocal chunks
        chunks += 1
        # one token of each stream was in flight when the recording began
        assert posted == sampled + 2
        return dispatch(self)

    monkeypatch.setattr(ModelRunner, "sample", count_sample)
    monkeypatch.setattr(PrefillChunk, "dispatch", check_posted)
    submit(loop, job("prompt", PROMPT * 4, max_tokens=2))
    for _ in range(30):
        output = loop.step()
        posted += sum(
            isinstance(u, Token) and u.job_id.startswith("stream") for u in output.updates
        )
    assert chunks > 10


def test_without_prompts_a_token_is_dispatched_before_the_last_one_is_read() -> None:
    """The device would otherwise wait for Python between two tokens."""
    loop = make_loop(tiny_model(), chunk=64)
    loop.submit(job("a", PROMPT, max_tokens=20, stop_token_ids=frozenset[int]()))
    posted = 0
    while posted < 15:
        posted += sum(isinstance(u, Token) for u in loop.step().updates)
    computed = [s.num_computed_tokens for s in loop._scheduler.running]  # pyright: ignore[reportPrivateUsage]
    assert computed == [len(PROMPT) + posted]
