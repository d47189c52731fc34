"""The sampling operation draws the tokens of MLX's operations with any parameters, and each row
alone as in a batch. The operation for log probabilities has their exact values."""

import subprocess
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.sampling import sampler
from app.engine.sampling.logprobs import compute_logprobs, compute_logprobs_with_mlx
from app.engine.sampling.sampler import FusedState, SamplerBatch, SamplerState
from app.engine.sampling.stages import StageInput
from models import kernels
from tests.engine.sampling.cases import SETTINGS, make_state, pack_bits, row_output, to_list
from tests.models.kernels.test_isa import list_supported_isas, run_program
from tests.rows import rows

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")

# filters, without the other stages
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 6.0},
    {"min_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 2.0},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"top_p": 0.0},
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 900},
]


def random_logits(rows: int, vocab: int, spread: float, seed: int = 0) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal((rows, vocab)) * spread
    return numbers.astype(np.float32)


def make_mlx_state(**options: Any) -> SamplerState:
    with mock.patch.object(sampler, "can_fuse", return_value=False):
        return make_state(**options)


def make_batch(
    make: Callable[..., SamplerState], knobs: dict[str, Any], rows: int, vocab: int, seed: int = 0
) -> SamplerBatch:
    return SamplerBatch(
        [make(vocab=vocab, seed=seed + row, num_drawn=row, **knobs) for row in range(rows)]
    )


def draw_both(logits: np.ndarray, knobs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of MLX's operations, and those of the kernel, in two steps."""
    batches = [make_batch(make, knobs, *logits.shape) for make in (make_mlx_state, make_state)]
    both = [
        np.array([batch.sample(mx.array(logits)).tokens for _ in range(2)]) for batch in batches
    ]
    return both[0], both[1]


@rows("knobs", SETTINGS.values(), ids=SETTINGS)
def test_it_is_used_for_all_parameters(knobs: dict[str, Any]) -> None:
    assert make_state(**knobs).fused is not None


@rows("knobs", FILTERS, ids=str, parts=2)
@rows("vocab", [2, 63, 1000, 32000])
@rows("spread", [0.1, 3.0])
def test_it_draws_the_tokens_of_mlxs_operations(
    knobs: dict[str, Any], vocab: int, spread: float
) -> None:
    expected, got = draw_both(random_logits(24, vocab, spread), knobs)
    np.testing.assert_array_equal(got, expected)


@rows("knobs", FILTERS, ids=str)
def test_equal_logits_are_kept_or_removed_as_by_mlxs_operations(knobs: dict[str, Any]) -> None:
    coarse = np.round(random_logits(24, 1500, 2.0, seed=1))
    expected, got = draw_both(coarse, knobs)
    np.testing.assert_array_equal(got, expected)


@rows("knobs", FILTERS, ids=str)
def test_masked_tokens_are_never_drawn(knobs: dict[str, Any]) -> None:
    logits = random_logits(40, 700, 1.0, seed=2)
    allowed = np.random.default_rng(3).random(logits.shape) < 0.02
    allowed[:, 17] = True
    logits[~allowed] = -np.inf
    expected, got = draw_both(logits, knobs)
    np.testing.assert_array_equal(got, expected)
    assert allowed[np.arange(40), got].all()


@rows("knobs", FILTERS, ids=str)
def test_a_row_without_a_meaning_is_invalid(knobs: dict[str, Any]) -> None:
    logits = random_logits(5, 300, 1.0, seed=4)
    logits[0, 7] = np.nan
    logits[1] = np.nan
    logits[2] = -np.inf
    logits[3, 0] = np.inf
    sampled = make_batch(make_state, knobs, 5, 300).sample(mx.array(logits))
    assert max(to_list(sampled.tokens)) < 300
    assert sampled.valid.tolist() == [False] * 4 + [True]
    sound = mx.array(np.tile(logits[4], (5, 1)))
    alone = make_batch(make_state, knobs, 5, 300).sample(sound)
    assert to_list(sampled.tokens)[4] == to_list(alone.tokens)[4]


# few tokens, so that words and repetitions occur; a prompt may contain others, never drawn
VOCAB = 7
IDS, KNOWN_IDS = st.integers(0, VOCAB - 1), st.integers(0, VOCAB + 1)
NUMBERS = st.sampled_from([-1.5, -0.25, 0.0, 0.5, 1.75])
STAGES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "filters": st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.integers(1, VOCAB),
            "top_p": st.sampled_from([0.3, 0.9]),
            "min_p": st.just(0.05),
        },
    ),
    "penalties": st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
            "presence_penalty": NUMBERS,
            "frequency_penalty": NUMBERS,
            "repeat_last_n": st.sampled_from([-1, 0, 1, 3, 64]),
        }
    ),
    "bias": st.fixed_dictionaries(
        {"logit_bias": st.lists(st.tuples(IDS, NUMBERS), max_size=6).map(tuple)}
    ),
    "allowed tokens": st.fixed_dictionaries(
        {"allowed_token_ids": st.lists(KNOWN_IDS, min_size=1, max_size=5).map(tuple)}
    ),
    "bad words": st.fixed_dictionaries(
        {
            "bad_words": st.lists(
                st.lists(IDS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
            ).map(tuple)
        }
    ),
    "minimum": st.fixed_dictionaries(
        {
            "min_tokens": st.integers(1, 6),
            "stop_token_ids": st.frozensets(KNOWN_IDS, min_size=1, max_size=5),
        }
    ),
}


@st.composite
def draw_row(draw: st.DrawFn) -> dict[str, Any]:
    """The options of `make_state`, with the parameters of some stages."""
    prompt = draw(st.lists(KNOWN_IDS, max_size=8).map(tuple))
    row: dict[str, Any] = {
        "prompt": prompt,
        "num_drawn": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0])),
    }
    for stage in draw(st.sets(st.sampled_from(sorted(STAGES)))):
        row |= draw(STAGES[stage])
    return row


@given(
    rows=st.lists(draw_row(), min_size=1, max_size=4),
    turns=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100)
def test_any_stages_of_any_rows_draw_the_tokens_of_mlxs_operations(
    rows: list[dict[str, Any]], turns: list[int], masked: bool, seed: int
) -> None:
    """The batch is rebuilt after each of the turns, and results are read at the end. Few logits
    differ, so many are equal."""
    rng = np.random.default_rng(seed)
    pairs = [(make_state(vocab=VOCAB, **row), make_mlx_state(vocab=VOCAB, **row)) for row in rows]
    results: list[tuple[Any, Any]] = []
    for count in turns:
        batches = [SamplerBatch(list(states)) for states in zip(*pairs, strict=True)]
        for _ in range(count):
            logits = np.round(rng.standard_normal((len(rows), VOCAB)) * 4).astype(np.float32) / 4
            bits = pack_bits(rng.random((len(rows), VOCAB)) < 0.7) if masked else None
            one, other = (
                batch.sample(mx.array(logits), bitmask=bits, top_logprobs=3) for batch in batches
            )
            results.append((one, other))
        for batch in batches:
            batch.release()
    for got, expected in results:
        assert got.valid.tolist() == expected.valid.tolist()
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert got.top_ids.tolist() == expected.top_ids.tolist()
        np.testing.assert_allclose(np.array(got.logprobs), np.array(expected.logprobs), atol=1e-5)


def test_only_rows_with_another_stage_use_mlxs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shift:
        """A stage that the operation does not include."""

        knobs = ("min_p",)

        def create_state(self, sequence: StageInput) -> "Shift":
            return self

        @property
        def group_key(self) -> bool:
            return True

        def create_batch(self, states: Sequence[Any]) -> "Shift":
            return self

        def apply(self, logits: mx.array, step: int) -> mx.array:
            return mx.where(mx.arange(logits.shape[-1]) == 4, 50, logits)

        def add(self, tokens: mx.array, step: int) -> None: ...
        def release(self, num_draws: int) -> None: ...

    monkeypatch.setattr(sampler, "STAGES", (*sampler.STAGES, Shift()))
    plain = [make_state(seed=row, presence_penalty=0.5, vocab=300) for row in range(3)]
    shifted = make_state(seed=7, min_p=0.1, frequency_penalty=0.5, vocab=300)
    assert all(state.fused is not None for state in plain)
    assert shifted.fused is None
    logits = random_logits(4, 300, 1.0)
    together = SamplerBatch([plain[0], shifted, *plain[1:]]).sample(mx.array(logits))
    assert to_list(together.tokens)[1] == 4
    others = [make_state(seed=row, presence_penalty=0.5, vocab=300) for row in range(3)]
    alone = SamplerBatch(others).sample(mx.array(logits[[0, 2, 3]]))
    assert to_list(alone.tokens) == [to_list(together.tokens)[row] for row in (0, 2, 3)]


def test_it_counts_the_tokens_that_other_ranks_drew() -> None:
    """`broadcast_tokens` replaces the drawn tokens."""
    state = make_state(temperature=0.0, frequency_penalty=2.0, vocab=4)
    batch = SamplerBatch([state], lambda tokens: mx.full(tokens.shape, 2, dtype=mx.uint32))
    logits = mx.array([[0.0, 1.0, 1.5, 1.0]])
    sampled = batch.sample(logits, top_logprobs=0)
    assert to_list(sampled.tokens) == [2]
    batch.release()
    assert to_list(SamplerBatch([state]).sample(logits).tokens) == [1]


def test_a_history_longer_than_the_buffer_is_kept() -> None:
    """Each token is drawn once, and then again, because each draw lowers its logit by the same
    amount."""
    state = make_state(temperature=0.0, frequency_penalty=1.0, vocab=100, prompt=())
    logits, tokens = mx.array(np.linspace(0.5, 0.0, 100, dtype=np.float32)[None]), list[int]()
    for count in (70, 90, 40):
        batch = SamplerBatch([state])
        drawn = [batch.sample(logits).tokens for _ in range(count)]
        batch.release()
        tokens += [to_list(one)[0] for one in drawn]
    assert tokens == [*range(100), *range(100)]


def test_padding_columns_and_strides_do_not_matter() -> None:
    logits = random_logits(4, 500, 1.0)

    def draw(array: mx.array) -> tuple[list[int], Any]:
        knobs = {"top_p": 0.9, "presence_penalty": 0.5}
        sampled = make_batch(make_state, knobs, 4, 500).sample(array, top_logprobs=2)
        return to_list(sampled.tokens), [row_output(sampled, row) for row in range(4)]

    expected = draw(mx.array(logits))
    padded = mx.array(np.pad(logits, [(0, 0), (0, 12)], constant_values=50))
    assert draw(padded) == expected
    assert draw(mx.array(np.ascontiguousarray(logits.T)).T) == expected


def test_the_number_of_threads_does_not_matter() -> None:
    logits, before = mx.array(random_logits(9, 4000, 2.0)), OPS.num_threads()
    found: list[Any] = []
    knobs = {"top_p": 0.8, "repetition_penalty": 1.2, "bad_words": ((1,),), "prompt": (1, 2, 3)}
    try:
        for threads in (1, 2, 3):
            OPS.set_num_threads(threads)
            sampled = make_batch(make_state, knobs, 9, 4000).sample(logits, top_logprobs=4)
            found.append([row_output(sampled, row) for row in range(9)])
    finally:
        OPS.set_num_threads(before)
    assert all(one == found[0] for one in found)


@rows("vocab", [1, 5, 64, 1000, 32_000, 151_936])
@rows("spread", [0.1, 3.0, 10.0])
def test_logprobs_are_exact(vocab: int, spread: float) -> None:
    logits = random_logits(6, vocab, spread)
    ids = np.random.default_rng(1).integers(0, vocab, 6, dtype=np.uint32)
    arrays = mx.array(logits), mx.array(ids), 5
    chosen, top, values = compute_logprobs(*arrays)
    assert top is not None
    assert values is not None
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(np.array(chosen), exact[np.arange(6), ids], rtol=2e-7, atol=1e-6)
    picked = np.take_along_axis(exact, np.array(top).astype(int), axis=1)
    np.testing.assert_allclose(np.array(values), picked, rtol=2e-7, atol=1e-6)
    others, mlx_top, _ = compute_logprobs_with_mlx(*arrays)
    assert top.tolist() == (mlx_top.tolist() if mlx_top is not None else None)
    np.testing.assert_allclose(np.array(chosen), np.array(others), rtol=0, atol=3e-4)


@pytest.mark.parametrize("count", [0, 1, 40, 700])
def test_the_most_likely_tokens_are_those_of_mlx(count: int) -> None:
    """Many logits are equal, and some are -infinity; the last row has no finite maximum."""
    logits = np.round(random_logits(12, 700, 2.0))
    logits[:6, ::3] = -np.inf
    logits[10, 5] = np.nan
    logits[11] = -np.inf
    ids = mx.array(np.full(12, 7, dtype=np.uint32))
    chosen, top, values = compute_logprobs(mx.array(logits), ids, count)
    _, expected, _ = compute_logprobs_with_mlx(mx.array(logits), ids, count)
    assert np.isnan(np.array(chosen)[10:]).all()
    if count == 0:
        assert top is None
        return
    assert top is not None
    assert expected is not None
    np.testing.assert_array_equal(np.array(top)[:10], np.array(expected)[:10])
    assert np.isnan(np.array(values)[10:]).all()
    assert np.array(top).max() < 700


def make_row(**options: Any) -> Any:
    state = make_state(**{"vocab": 4, "prompt": (), **options})
    assert isinstance(state.fused, FusedState)
    return state.fused.row


LOGITS = mx.zeros((1, 4))
PLAIN, SEARCHING = ({}, {"frequency_penalty": 1.0})


@rows(
    ("logits", "row", "arguments"),
    [
        (LOGITS.astype(mx.float16), PLAIN, ([0], 0)),
        (mx.zeros((4,)), PLAIN, ([0], 0)),
        (mx.zeros((1, 0)), PLAIN, ([0], 0)),
        (mx.zeros((1, 5)), PLAIN, ([0], 0)),
        (mx.zeros((2, 4)), PLAIN, ([0], 0)),
        (LOGITS, PLAIN, ([], 0)),
        (LOGITS, PLAIN, ([-1], 0)),
        (LOGITS, PLAIN, ([0], -1)),
        (LOGITS, SEARCHING, ([1], 0)),
        (LOGITS, SEARCHING, ([1], 0, mx.zeros((2,), mx.uint32))),
        (LOGITS, SEARCHING, ([1], 0, mx.zeros((1,), mx.int32))),
        (LOGITS, SEARCHING, ([0], 1)),
        (LOGITS, SEARCHING, ([0], 2, None, mx.zeros((1, 1), mx.uint32))),
        (LOGITS, SEARCHING, ([0], 1, None, mx.zeros((1, 2), mx.uint32))),
        (LOGITS, PLAIN, ([0], 0, None, None, mx.zeros((1, 0), mx.uint32))),
        (LOGITS, PLAIN, ([0], 0, None, None, mx.zeros((2, 1), mx.uint32))),
        (LOGITS, PLAIN, ([0], 0, None, None, mx.zeros((1, 1), mx.int32))),
    ],
)
def test_other_shapes_and_types_are_an_error(
    logits: mx.array, row: dict[str, Any], arguments: Any
) -> None:
    with pytest.raises(ValueError, match=r"must "):
        OPS.sample(logits, [make_row(**row)], *arguments)


@pytest.mark.parametrize(
    "knobs", [{"logit_bias": ((-1, 1.0),)}, {"allowed_token_ids": (-1,)}, {"bad_words": ((-1,),)}]
)
def test_a_negative_token_is_an_error(knobs: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        make_row(**knobs)


@pytest.mark.parametrize(
    ("logits", "tokens", "count"),
    [
        (LOGITS.astype(mx.float16), mx.zeros((1,), mx.uint32), 1),
        (LOGITS, mx.zeros((1,), mx.int32), 1),
        (LOGITS, mx.zeros((2,), mx.uint32), 1),
        (LOGITS, mx.zeros((1,), mx.uint32), 5),
        (LOGITS, mx.zeros((1,), mx.uint32), -1),
    ],
)
def test_logprobs_check_their_arguments(logits: mx.array, tokens: mx.array, count: int) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        OPS.logprobs(logits, tokens, count)


# one line: the instruction set in use, and a hash of tokens
PROGRAM = """
import hashlib
import mlx.core as mx
import numpy as np
from tests.engine.sampling.cases import SETTINGS, make_state
from app.engine.sampling.sampler import SamplerBatch
from models import kernels
rng, digest = np.random.default_rng(0), hashlib.sha256()
for vocab in (500, 3001):
    for name, knobs in SETTINGS.items():
        states = [make_state(vocab=vocab, **{"seed": row, **knobs}) for row in range(8)]
        batch = SamplerBatch(states)
        for _ in range(3):
            bits = mx.array(rng.integers(0, 2**32, (8, vocab // 32 + 1), dtype=np.uint32))
            logits = mx.array(rng.standard_normal((8, vocab)).astype(np.float32))
            sampled = batch.sample(logits, bitmask=bits, top_logprobs=5)
            digest.update(np.array(sampled.tokens).tobytes() + np.array(sampled.top_ids).tobytes())
print(kernels.ops().isa(), digest.hexdigest())
"""


@pytest.mark.recorded
def test_instruction_sets_draw_the_same_tokens() -> None:
    runs: list[subprocess.CompletedProcess[str]] = [
        run_program(isa, PROGRAM) for isa in list_supported_isas()
    ]
    assert len({run.stdout.split()[1] for run in runs}) == 1, [run.stdout for run in runs]
