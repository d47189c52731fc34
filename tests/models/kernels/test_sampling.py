"""The sampling kernel draws the tokens of MLX's operations, and each row alone as in a batch."""

import subprocess
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.sampling_params import SamplingParams
from app.engine.sampling.draw import Draw, SamplingMethod, choose_method, select_method
from models import kernels
from tests.models.kernels.test_isa import list_supported_isas, run_program

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")

FUSED = SamplingMethod("fused")
KNOBS: list[dict[str, Any]] = [
    {},
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


def make_draw(
    method: SamplingMethod, knobs: dict[str, Any], rows: int, first_seed: int = 0
) -> Draw:
    return Draw(
        method,
        [SamplingParams(**knobs)] * rows,
        seeds=[first_seed + row for row in range(rows)],
        num_drawn=list(range(rows)),
    )


def draw_both(logits: np.ndarray, knobs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of MLX's operations, and those of the kernel, at two steps."""
    rows, vocab = logits.shape
    methods = choose_method(SamplingParams(**knobs), vocab), FUSED
    draws = [make_draw(method, knobs, rows) for method in methods]
    both = [np.array([draw(mx.array(logits), step) for step in (0, 5)]) for draw in draws]
    return both[0], both[1]


def test_it_is_used_for_all_parameters_but_greedy_ones() -> None:
    assert select_method(SamplingParams(top_p=0.5), 100) == FUSED
    assert select_method(SamplingParams(temperature=0), 100) == SamplingMethod("greedy")


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("vocab", [2, 63, 1000, 32000])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_it_draws_the_tokens_of_mlxs_operations(
    knobs: dict[str, Any], vocab: int, spread: float
) -> None:
    expected, got = draw_both(random_logits(24, vocab, spread), knobs)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_equal_logits_are_kept_or_removed_as_by_mlxs_operations(knobs: dict[str, Any]) -> None:
    coarse = np.round(random_logits(24, 1500, 2.0, seed=1))
    expected, got = draw_both(coarse, knobs)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_masked_tokens_are_never_drawn(knobs: dict[str, Any]) -> None:
    logits = random_logits(40, 700, 1.0, seed=2)
    allowed = np.random.default_rng(3).random(logits.shape) < 0.02
    allowed[:, 17] = True
    logits[~allowed] = -np.inf
    expected, got = draw_both(logits, knobs)
    np.testing.assert_array_equal(got, expected)
    assert allowed[np.arange(40), got].all()


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_a_row_without_a_meaning_gives_a_token_of_the_vocabulary(knobs: dict[str, Any]) -> None:
    logits = random_logits(5, 300, 1.0, seed=4)
    logits[0, 7] = np.nan
    logits[1] = np.nan
    logits[2] = -np.inf
    logits[3, 0] = np.inf
    tokens = np.array(make_draw(FUSED, knobs, 5)(mx.array(logits), 0))
    assert (tokens < 300).all()
    alone = make_draw(FUSED, knobs, 5)(mx.array(np.where(np.isnan(logits), 0, logits)), 0)
    assert tokens[4] == np.array(alone)[4]


@given(
    knobs=st.sampled_from(KNOBS),
    vocab=st.integers(1, 400),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_row_gives_the_same_token_alone_and_in_a_batch(
    knobs: dict[str, Any], vocab: int, spread: float, seed: int
) -> None:
    logits = random_logits(3, vocab, spread, seed=seed % 1000)
    batch = np.array(make_draw(FUSED, knobs, 3, seed)(mx.array(logits), 1))
    last = Draw(FUSED, [SamplingParams(**knobs)], seeds=[seed + 2], num_drawn=[2])
    assert np.array(last(mx.array(logits[2:]), 1)) == batch[2]


def test_padding_columns_and_strides_do_not_matter() -> None:
    logits = random_logits(4, 500, 1.0)
    draw = make_draw(FUSED, {"top_p": 0.9}, 4)
    expected = np.array(draw(mx.array(logits), 0))
    padded = mx.array(np.pad(logits, [(0, 0), (0, 12)], constant_values=50))[:, :500]
    np.testing.assert_array_equal(np.array(draw(padded, 0)), expected)
    transposed = mx.array(np.ascontiguousarray(logits.T)).T
    np.testing.assert_array_equal(np.array(draw(transposed, 0)), expected)


def test_the_number_of_threads_does_not_matter() -> None:
    logits, before = mx.array(random_logits(9, 4000, 2.0)), OPS.num_threads()
    found: list[np.ndarray] = []
    try:
        for threads in (1, 2, 3):
            OPS.set_num_threads(threads)
            found.append(np.array(make_draw(FUSED, {"top_p": 0.8}, 9)(logits, 0)))
    finally:
        OPS.set_num_threads(before)
    assert all((tokens == found[0]).all() for tokens in found)


@pytest.mark.parametrize(
    ("logits", "settings", "words"),
    [
        (mx.zeros((2, 4), mx.float16), mx.ones((2, 4)), mx.ones((2, 5), mx.uint32)),
        (mx.zeros((4,)), mx.ones((1, 4)), mx.ones((1, 5), mx.uint32)),
        (mx.zeros((2, 4)), mx.ones((1, 4)), mx.ones((2, 5), mx.uint32)),
        (mx.zeros((2, 4)), mx.ones((2, 4)), mx.ones((2, 5), mx.int32)),
        (mx.zeros((2, 0)), mx.ones((2, 4)), mx.ones((2, 5), mx.uint32)),
    ],
)
def test_other_shapes_and_types_are_an_error(
    logits: mx.array, settings: mx.array, words: mx.array
) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        OPS.sample(logits, settings, words)


# one line: the instruction set in use, and a hash of tokens
PROGRAM = """
import hashlib
import mlx.core as mx
import numpy as np
from models.kernels import ops
rng, digest = np.random.default_rng(0), hashlib.sha256()
for vocab in (5, 100, 3001):
    logits = mx.array(rng.standard_normal((16, vocab)).astype(np.float32))
    words = mx.array(rng.integers(0, 2**32, (16, 5), dtype=np.uint32) | 1)
    for temperature, top_k, top_p, min_p in (
        (1, 0, np.inf, -np.inf), (0.7, 0, 0.9, -np.inf), (1, 20, 0.8, -3), (2, 0, np.inf, -2)
    ):
        row = np.array([[temperature, top_k, top_p, min_p]] * 16, dtype=np.float32)
        digest.update(np.array(ops().sample(logits, mx.array(row), words)).tobytes())
print(ops().isa(), digest.hexdigest())
"""


def test_instruction_sets_draw_the_same_tokens() -> None:
    runs: list[subprocess.CompletedProcess[str]] = [
        run_program(isa, PROGRAM) for isa in list_supported_isas()
    ]
    assert len({run.stdout.split()[1] for run in runs}) == 1, [run.stdout for run in runs]
