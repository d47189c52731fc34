"""Embeddings: each input gets the vector that it gets alone, regardless of other inputs in its
forward pass, other requests and memory pressure; a stream's tokens wait no longer than for a
prompt. Pooling and normalization follow the definitions of the papers."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from app.core.requests import EmbedJob, PoolingType
from app.engine.embedder import MAX_ROWS
from app.engine.memory_profile import profile_memory
from app.engine.pooler import normalize, pool_hidden_states, pooling_weights, vectors_to_bytes
from models.base import Model, SelectPositions, select_all
from tests.engine import hybrid
from tests.engine.harness import (
    NEAR,
    Outcome,
    ScheduledJob,
    assert_same,
    job,
    make_loop,
    run_schedule,
    tiny_model,
)
from tests.models import parity, test_mlx_lm_adapter
from tests.models.architectures import Case, cases, mark_by_cache

pytestmark = pytest.mark.recorded

HIDDEN: Any = np.random.default_rng(0).standard_normal((3, 7, 5)).astype(np.float32)
LENGTHS = (7, 1, 4)

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid": hybrid.Model}
OURS = [case for case in cases() if case not in test_mlx_lm_adapter.CASES]
CHUNK = 16


def numbers(vector: bytes | None) -> Any:
    assert vector is not None
    return np.frombuffer(vector, dtype="<f4")


def batch_weights(pooling: PoolingType) -> mx.array:
    return mx.array([pooling_weights(pooling, length, 0, 7) for length in LENGTHS])


def test_mean_pooling_ignores_padding() -> None:
    expected = [HIDDEN[row, :length].mean(axis=0) for row, length in enumerate(LENGTHS)]
    np.testing.assert_allclose(
        pool_hidden_states(mx.array(HIDDEN), batch_weights("mean")), expected, atol=1e-6
    )


def test_cls_pooling_uses_the_first_position() -> None:
    np.testing.assert_array_equal(
        pool_hidden_states(mx.array(HIDDEN), batch_weights("cls")), HIDDEN[:, 0]
    )


def test_last_pooling_ignores_padding() -> None:
    expected = [HIDDEN[row, length - 1] for row, length in enumerate(LENGTHS)]
    np.testing.assert_array_equal(
        pool_hidden_states(mx.array(HIDDEN), batch_weights("last")), expected
    )


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_chunks_add_up_to_the_full_vector(pooling: PoolingType, cut: int) -> None:
    full = pool_hidden_states(mx.array(HIDDEN[:1]), mx.array([pooling_weights(pooling, 7, 0, 7)]))
    parts = [
        pool_hidden_states(
            mx.array(HIDDEN[:1, start:end]),
            mx.array([pooling_weights(pooling, 7, start, end - start)]),
        )
        for start, end in ((0, cut), (cut, 7))
    ]
    np.testing.assert_allclose(parts[0] + parts[1], full, atol=1e-6)


def test_padding_may_hold_any_value() -> None:
    """16-bit states may overflow in the padding."""
    hidden = HIDDEN.copy()
    hidden[1, 1:], hidden[2, 4:] = math.nan, math.inf
    for pooling in ("mean", "last"):
        clean, padded = (
            pool_hidden_states(mx.array(h), batch_weights(pooling)) for h in (HIDDEN, hidden)
        )
        np.testing.assert_array_equal(clean, padded)


@pytest.mark.parametrize("dimensions", [None, 5, 3, 1])
def test_a_vector_is_truncated_before_it_is_normalized(dimensions: int | None) -> None:
    [vector] = vectors_to_bytes(normalize(mx.array(HIDDEN[0, :1]), [dimensions]), [dimensions])
    expected = HIDDEN[0, 0, :dimensions]
    np.testing.assert_allclose(numbers(vector), expected / np.linalg.norm(expected), atol=1e-6)


def test_each_row_has_its_own_dimensions() -> None:
    dimensions = [2, None, 4]
    vectors = vectors_to_bytes(normalize(mx.array(HIDDEN[:, 0]), dimensions), dimensions)
    assert [len(numbers(v)) for v in vectors] == [2, 5, 4]
    for row, vector in enumerate(vectors):
        expected = HIDDEN[row, 0, : dimensions[row]]
        np.testing.assert_allclose(numbers(vector), expected / np.linalg.norm(expected), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_neither_underflow_nor_overflow(scale: float) -> None:
    [vector] = vectors_to_bytes(normalize(mx.array([[3.0, 4.0]]) * scale, [None]), [None])
    np.testing.assert_allclose(numbers(vector), [0.6, 0.8], rtol=1e-5)


def test_zero_vectors_stay_zero_and_non_finite_ones_are_none() -> None:
    rows = mx.array([[0.0, 0.0], [math.nan, 1.0], [1.0, 0.0], [1.0, math.inf]])
    zeros, *others = vectors_to_bytes(normalize(rows, [None] * 4), [None] * 4)
    assert list(numbers(zeros)) == [0, 0]
    assert [vector is None for vector in others] == [True, False, True]


def test_16_bit_states_are_pooled_in_float32() -> None:
    hidden = mx.ones((1, 3000, 1), dtype=mx.bfloat16)
    got = pool_hidden_states(hidden, mx.array([pooling_weights("mean", 3000, 0, 3000)]))
    assert (got.dtype, got.item()) == (mx.float32, pytest.approx(1, abs=1e-4))


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


def texts(*lengths: int, seed: int = 0, vocab: int = 256) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(seed)
    return tuple(tuple(rng.choices(range(vocab), k=length)) for length in lengths)


def embed_job(
    name: str,
    inputs: Sequence[tuple[int, ...]],
    pooling: PoolingType = "mean",
    dimensions: int | None = None,
) -> EmbedJob:
    return EmbedJob(id=name, inputs=tuple(inputs), pooling=pooling, dimensions=dimensions)


def embed_alone(model: Model, ids: Sequence[int], request: EmbedJob) -> Any:
    """The vector of one input in its own forward pass, in float64 from the hidden states on."""
    hidden = np.array(model(mx.array([ids]), model.make_kv())[0].astype(mx.float32), np.float64)
    found = hidden.mean(axis=0) if request.pooling == "mean" else hidden[-1]
    found = found[: request.dimensions]
    return found / np.linalg.norm(found)


def assert_vectors(model: Model, outcome: Outcome, request: EmbedJob) -> None:
    assert (outcome.reason, outcome.error) == ("embedded", None)
    assert outcome.vectors is not None
    for vector, ids in zip(outcome.vectors, request.inputs, strict=True):
        expected = embed_alone(model, ids, request)
        np.testing.assert_allclose(np.frombuffer(vector, "<f4"), expected, atol=NEAR)


@pytest.mark.parametrize("case", mark_by_cache(OURS))
def test_padding_changes_nothing_for_any_architecture(case: Case, tmp_path: Path) -> None:
    """For windows, convolutions, recurrent states and mixtures of experts. Inputs of all lengths
    share a pass, some as long as a chunk and some longer."""
    parity.save_reference(case, tmp_path)
    model = parity.load_model(tmp_path)
    loop = make_loop(model, chunk=64, vocab=case.vocab)
    inputs = texts(1, 2, 3, 5, 9, 14, 20, 21, 40, 64, 65, 150, vocab=case.vocab)
    for pooling in ("mean", "last"):
        request = embed_job(pooling, inputs, pooling)
        assert_vectors(model, run_schedule(loop, [ScheduledJob(job=request)])[pooling], request)


@pytest.mark.parametrize("chunk", [1, 5, 16, 300])
@pytest.mark.parametrize("dimensions", [None, 3])
def test_vectors_do_not_depend_on_the_chunk_size(
    model: Model, chunk: int, dimensions: int | None
) -> None:
    loop = make_loop(model, chunk=chunk)
    jobs = [
        embed_job(pooling, texts(7, 1, 33, 4, 33, 18), pooling, dimensions)
        for pooling in ("mean", "last")
    ]
    got = run_schedule(loop, [ScheduledJob(job=one) for one in jobs])
    for one in jobs:
        assert_vectors(model, got[one.id], one)
    stats = loop.stats()
    assert (stats.embedded_tokens, stats.embedding_jobs) == (2 * 96, 0)
    assert stats.ledger.kv == 0


def test_the_capacity_reports_the_hidden_size() -> None:
    assert make_loop(tiny_model()).capacity.hidden_size == 16


def test_a_class_that_returns_only_logits_has_no_hidden_size(tmp_path: Path) -> None:
    case = test_mlx_lm_adapter.CASES[0]
    parity.save_reference(case, tmp_path)
    loop = make_loop(parity.load_model(tmp_path), vocab=case.vocab)
    assert loop.capacity.hidden_size is None


class RecordingModel:
    """A model that records the shapes of its calls."""

    batch_invariant: ClassVar[bool] = False
    selects_logits: ClassVar[bool] = False

    def __init__(self, model: Model) -> None:
        self._model: Any = model
        self.kv_dtype, self.image_rules = model.kv_dtype, model.image_rules
        self.shapes: list[tuple[int, ...]] = []
        self.logits, self.make_kv, self.shift = model.logits, model.make_kv, model.shift
        self.fails: Callable[[mx.array], bool] = lambda tokens: False

    def __call__(
        self, tokens: mx.array, kv: Any, select: SelectPositions = select_all, images: Any = None
    ) -> mx.array:
        self.shapes.append(tokens.shape)
        if self.fails(tokens):
            raise RuntimeError("planted")
        return self._model(tokens, kv, select, images)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return weights


def test_short_inputs_share_passes_no_larger_than_a_chunk() -> None:
    model = RecordingModel(tiny_model())
    loop = make_loop(model, chunk=64)
    model.shapes.clear()
    jobs = [embed_job("many", texts(*[2] * 40)), embed_job("few", texts(2, 3, 30, 200))]
    run_schedule(loop, [ScheduledJob(job=one) for one in jobs])
    assert all(rows * width <= 64 for rows, width in model.shapes)
    assert max(rows for rows, _ in model.shapes) == MAX_ROWS
    assert len(model.shapes) <= 3 + 1 + 4


def test_jobs_with_different_pooling_and_dimensions_share_a_pass() -> None:
    inner = tiny_model()
    model = RecordingModel(inner)
    loop = make_loop(model, chunk=64)
    model.shapes.clear()
    jobs = [
        embed_job("a", texts(3), "mean"),
        embed_job("b", texts(4), "last"),
        embed_job("c", texts(5), "mean", 2),
    ]
    got = run_schedule(loop, [ScheduledJob(job=one) for one in jobs])
    assert model.shapes == [(3, 5)]
    for one in jobs:
        assert_vectors(inner, got[one.id], one)


def test_a_small_job_does_not_wait_for_a_large_one() -> None:
    model = tiny_model()
    loop = make_loop(model, chunk=CHUNK)
    large = embed_job("large", texts(*[CHUNK] * 60))
    loop.embed(large)
    for _ in range(3):
        loop.step()
    loop.embed(embed_job("small", texts(5)))
    end_steps = dict[str, int]()
    for step in range(100):
        end_steps |= {result.job_id: step for result in loop.step().embed_results}
    assert end_steps == {"small": 1, "large": 58}


@pytest.mark.parametrize("policy", ["single", "radix"])
def test_concurrent_generation_and_embedding_do_not_change_results(
    model: Model, policy: str, ties: list[int]
) -> None:
    running = 1 if policy == "single" else 3
    loop = make_loop(model, running=running, policy=policy, chunk=CHUNK)
    sequences = [job(str(i), ids, max_tokens=20) for i, ids in enumerate(texts(70, 40, 9, seed=1))]
    inputs = [embed_job("e0", texts(90, 5, 3)), embed_job("e1", texts(30, 2), "last")]
    schedule = [ScheduledJob(job=one, at=4 * i) for i, one in enumerate((*sequences, *inputs))]
    got = run_schedule(loop, schedule)
    for one in sequences:
        own = run_schedule(make_loop(model, chunk=CHUNK), [ScheduledJob(job=one)])
        ties.append(assert_same(got[one.id], own[one.id]))
    for one in inputs:
        assert_vectors(model, got[one.id], one)


def test_prompts_and_inputs_share_the_chunk_of_a_step() -> None:
    """A stream's next token waits no longer than for a prompt; prompts and inputs alternate, so
    that neither waits for the end of the other."""
    model = RecordingModel(tiny_model())
    loop = make_loop(model, running=2, chunk=CHUNK, policy="radix")
    loop.submit(job("stream", [1, 2, 3], max_tokens=100, stop_token_ids=frozenset()))
    for _ in range(4):
        loop.step()
    loop.embed(embed_job("inputs", texts(*[40] * 6, *[3] * 40)))
    loop.submit(job("prompt", texts(150)[0], max_tokens=2))
    kinds, work = list[str](), 0
    while len(kinds) < 16:
        model.shapes.clear()
        before = loop.stats()
        output = loop.step()
        assert [type(update).__name__ for update in output.updates].count("Token") >= 1
        # prompts and inputs are computed before the token, except a chunk that the step begins
        for rows, width in model.shapes:
            work = 0 if width == 1 else work + rows * width
            assert work <= CHUNK + 2
        embedded = output.stats.embedded_tokens - before.embedded_tokens
        kinds.append("inputs" if embedded else "prompt")
    assert all(a != b for a, b in itertools.pairwise(kinds))


@pytest.mark.parametrize("after", range(0, 12, 2))
def test_a_cancelled_job_frees_its_memory_and_does_not_affect_others(
    model: Model, after: int
) -> None:
    loop = make_loop(model, chunk=CHUNK)
    gone, other = embed_job("gone", texts(3, 50, 90)), embed_job("other", texts(5, 44, 60))
    schedule = [ScheduledJob(job=gone, cancelled_at=after), ScheduledJob(job=other)]
    got = run_schedule(loop, schedule)
    assert got["gone"].reason == ""
    assert_vectors(model, got["other"], other)
    assert loop.idle
    assert loop.stats().ledger.kv == 0


def footprint(model: Model, positions: int) -> int:
    memory = profile_memory(
        model, budget=0, weights=0, chunk=64, max_batch_size=1, heads=0, context=512
    )
    return memory.kv_footprint(positions)


def test_a_sequence_reclaims_borrowed_memory_and_the_input_restarts() -> None:
    """The stream's caches grow at 512 positions, but the long input uses the memory for that."""
    inner = tiny_model()
    model = RecordingModel(inner)
    loop = make_loop(
        model, running=2, policy="radix", chunk=4, budget=footprint(inner, 1024), context=1024
    )
    long = embed_job("long", texts(500))
    got = run_schedule(
        loop,
        [
            ScheduledJob(job=job("stream", [1] * 250, max_tokens=300, stop_token_ids=frozenset())),
            ScheduledJob(job=long, at=240),
        ],
    )
    assert_vectors(inner, got["long"], long)
    assert len(got["stream"].tokens) == 300
    assert loop.stats().preemptions == 0
    assert sum(shape == (1, 4) for shape in model.shapes) > (250 + 500) // 4 + 1, (
        "the input did not restart"
    )


def test_inputs_are_served_while_sequences_keep_queueing() -> None:
    """Memory fits one at a time, and a job that waits for memory is not overtaken."""
    model = tiny_model()
    loop = make_loop(
        model, running=4, policy="radix", chunk=64, budget=footprint(model, 256), context=256
    )
    long = embed_job("long", texts(200))
    ends = list[str]()
    loop.submit(job("0", [1] * 100, max_tokens=20, stop_token_ids=frozenset()))
    loop.step()
    loop.embed(long)
    for i in range(1, 200):
        loop.submit(job(str(i), [i % 200] * 100, max_tokens=20, stop_token_ids=frozenset()))
        ends += [e.job_id for e in loop.step().embed_results]
        if ends:
            break
    assert ends == ["long"]


@examples(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_ledger_is_never_overdrawn(model: Model, data: st.DataObject) -> None:
    """`run_schedule` checks after every step that the ledger is not overdrawn."""
    num_sequences = data.draw(st.integers(2, 5))
    loop = make_loop(
        model, running=4, policy="radix", chunk=64, budget=num_sequences * footprint(model, 256)
    )
    max_length, lengths = loop.capacity.context_length, st.integers(1, 400)
    schedule = list[ScheduledJob]()
    for i in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, 30))
        end = data.draw(st.none() | st.integers(at + 1, 60))
        if data.draw(st.booleans()):
            ids = texts(min(data.draw(lengths), max_length - 20), seed=i)[0]
            one: Any = job(str(i), ids, max_tokens=20, stop_token_ids=frozenset())
        else:
            sizes = data.draw(st.lists(lengths, min_size=1, max_size=5))
            one = embed_job(str(i), texts(*(min(size, max_length) for size in sizes), seed=i))
        schedule.append(ScheduledJob(job=one, at=at, cancelled_at=end))
    got = run_schedule(loop, schedule)
    for scheduled in schedule:
        outcome = got[scheduled.job.id]
        assert outcome.reason in ("length", "cancelled", "embedded") or scheduled.cancelled_at
        if outcome.vectors is not None:
            assert isinstance(scheduled.job, EmbedJob)
            assert_vectors(model, outcome, scheduled.job)
    assert loop.stats().ledger.kv == 0


def test_a_failing_input_ends_only_its_own_job() -> None:
    """The job that fails a shared pass is unknown, so each job is retried alone."""
    inner = tiny_model()
    model = RecordingModel(inner)
    loop = make_loop(model, chunk=64)
    model.fails = lambda tokens: bool(mx.any(tokens == 255).item())
    jobs = [
        embed_job("good", texts(3, 5, vocab=200)),
        embed_job("bad", [(1, 2), (255, 1)]),
        embed_job("long", texts(100, vocab=200)),
    ]
    got = run_schedule(loop, [ScheduledJob(job=one) for one in jobs])
    assert (got["bad"].reason, got["bad"].error) == (
        "error",
        "the engine failed while processing this request",
    )
    assert_vectors(inner, got["good"], jobs[0])
    assert_vectors(inner, got["long"], jobs[2])
    assert loop.stats().ledger.kv == 0


def test_a_failing_long_input_frees_its_memory() -> None:
    model = RecordingModel(tiny_model())
    loop = make_loop(model, chunk=16)
    model.fails = lambda tokens: bool(mx.any(tokens == 255).item())
    got = run_schedule(loop, [ScheduledJob(job=embed_job("bad", [(*[1] * 40, 255)]))])
    assert got["bad"].reason == "error"
    assert loop.stats().ledger.kv == 0


def test_nan_in_a_vector_is_an_error() -> None:
    model: Any = tiny_model()
    weight = model.model.embed_tokens.weight
    weight[5] = mx.array([float("nan")] * 16)
    # a layer does not notice in-place writes to its array
    model.model.embed_tokens.weight = weight
    loop = make_loop(model, chunk=64)
    good, bad = embed_job("good", [(1, 2, 3)]), embed_job("bad", [(1,), (5, 1)])
    got = run_schedule(loop, [ScheduledJob(job=good), ScheduledJob(job=bad)])
    assert "NaN or infinite hidden states" in (got["bad"].error or "")
    assert_vectors(model, got["good"], good)
