"""The draw against the definitions of its filters, and statistical tests of its noise."""

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.sampling_params import SamplingParams
from app.engine.sampling.draw import (
    Draw,
    SamplingMethod,
    gumbel_noise,
    lowbias32,
    select_method,
    topk,
)
from tests.rows import rows

VOCAB = 5000


def draw(method: SamplingMethod, logits: Any, *, seed: int = 0, turn: int = 0, **knobs: Any) -> int:
    one = Draw(method, [SamplingParams(**knobs)], seeds=[seed], num_drawn=[0])
    return cast(int, one(mx.array(np.array([logits], dtype=np.float32)), turn).item())


def random_logits(spread: float, *, step: float = 0.0, seed: int = 0) -> Any:
    """step: round to multiples of it, as half precision does; many are equal then."""
    logits = np.random.default_rng(seed).standard_normal(VOCAB) * spread
    return (np.round(logits / step) * step if step else logits).astype(np.float32)


def make_noise(keys: mx.array, ids: mx.array) -> mx.array:
    """keys: [b, 2], the start of a row and its stride, which becomes odd."""
    return gumbel_noise(keys[:, :1], keys[:, 1:] | 1, ids)


def likelihoods(logits: Any) -> Any:
    exp = np.exp(logits.astype(np.float64) - logits.max())
    return exp / exp.sum()


def mask_top_k(logits: Any, k: int) -> Any:
    """Keep exactly k logits; of equal ones the lower ids."""
    kept = np.lexsort((np.arange(len(logits)), -logits))[:k]
    return np.where(np.isin(np.arange(len(logits)), kept), logits, -np.inf)


def mask_top_p(logits: Any, p: float) -> Any:
    """Keeps an ID if the more likely ones sum to less than p, and always the most likely one."""
    likely = likelihoods(logits)
    _, level_of = np.unique(-likely, return_inverse=True)
    mass = np.bincount(level_of, weights=likely)
    above = np.cumsum(mass) - mass
    kept = (above[level_of] < p) | (level_of == 0)
    return np.where(kept, logits, -np.inf)


@rows(
    ("knobs", "expected"),
    [
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.1}, SamplingMethod("greedy")),
        ({"temperature": 1e-40}, SamplingMethod("greedy")),
        ({}, SamplingMethod("all")),
        ({"min_p": 0.1}, SamplingMethod("all")),
        ({"top_k": 1}, SamplingMethod("best", 64)),
        ({"top_k": 64, "top_p": 0.5}, SamplingMethod("best", 64)),
        ({"top_k": 65}, SamplingMethod("best", 128)),
        ({"top_k": 4999}, SamplingMethod("best", 5000)),
        ({"top_k": 5000}, SamplingMethod("all")),
        ({"top_p": 0.999999999}, SamplingMethod("nucleus", 15)),
        ({"top_p": 0.9}, SamplingMethod("nucleus", 15)),
        ({"top_p": 0.5}, SamplingMethod("nucleus", 63)),
        ({"top_p": 0.1}, SamplingMethod("nucleus", 511)),
        ({"top_p": 0.0}, SamplingMethod("nucleus", 8191)),
    ],
    ids=str,
)
def test_the_sampling_method_follows_from_the_settings(
    knobs: dict[str, Any], expected: SamplingMethod
) -> None:
    assert select_method(SamplingParams(**knobs), VOCAB) == expected


@given(
    levels=st.integers(1, 400),
    width=st.integers(1, 3000),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_topk_returns_the_largest_and_the_first_of_equals(
    levels: int, width: int, share: float, seed: int
) -> None:
    count = max(1, round(width * share**4))
    values = np.random.default_rng(seed).integers(0, levels, (3, width)).astype(np.float32)
    values[values == 0] = -np.inf
    indices, top_values = topk(mx.array(values), count)
    for row in range(3):
        expected = np.lexsort((np.arange(width), -values[row]))[:count]
        assert indices[row].tolist() == expected.tolist()
        assert top_values[row].tolist() == values[row][expected].tolist()


def test_topk_of_a_row_of_nan_returns_valid_indices() -> None:
    """The row is padded to whole blocks, in which NaN comes last."""
    values = mx.concatenate([mx.full((1, 2993), mx.nan), mx.full((1, 6), -mx.inf)], axis=-1)
    indices, _ = topk(values, 20)
    assert cast(int, indices.max().item()) < 2999


@rows("k", [1, 3, 64, 100, 4000])
@rows("step", [0.0, 0.5])
@rows("temperature", [0.3, 2.0])
def test_top_k_draws_as_if_the_rest_were_masked(k: int, step: float, temperature: float) -> None:
    knobs: dict[str, Any] = {"top_k": k, "temperature": temperature}
    for seed in range(10):
        logits = random_logits(2.0, step=step, seed=seed)
        expected = draw(
            SamplingMethod("all"), mask_top_k(logits, k), seed=seed, temperature=temperature
        )
        assert (
            draw(select_method(SamplingParams(**knobs), VOCAB), logits, seed=seed, **knobs)
            == expected
        )


@rows("p", [0.0, 1e-6, 0.02, 0.3, 0.5, 0.9, 0.99, 0.99999])
@rows(("spread", "step"), [(0.1, 0.0), (2.0, 0.0), (2.0, 0.5), (8.0, 0.0)])
def test_top_p_draws_as_if_the_rest_were_masked(p: float, spread: float, step: float) -> None:
    """From flat rows, where the nucleus is most of the vocabulary, to steep ones, where it is one
    id; and with equal logits at its edge."""
    for seed in range(10):
        logits = random_logits(spread, step=step, seed=seed)
        expected = draw(SamplingMethod("all"), mask_top_p(logits, p), seed=seed)
        method = select_method(SamplingParams(top_p=p), VOCAB)
        assert method.kind == "nucleus"
        assert draw(method, logits, seed=seed, top_p=p) == expected


def test_if_all_candidates_lie_outside_the_nucleus_one_of_them_is_drawn() -> None:
    """This happens only with three candidates instead of 511."""
    method = SamplingMethod("nucleus", 3)
    ids = mx.arange(VOCAB, dtype=mx.uint32)
    num_outside = 0
    for seed in range(40):
        logits = random_logits(1.0, seed=seed)
        one = Draw(method, [SamplingParams(top_p=0.1)], seeds=[seed], num_drawn=[0])
        scores = np.array(one._add_noise(mx.array(logits - logits.max())[None], ids, 0))[0]
        candidates = np.argsort(-scores)[:3].tolist()
        inside = [id for id in candidates if mask_top_p(logits, 0.1)[id] > -np.inf]
        expected = inside[:1] or candidates
        assert draw(method, logits, seed=seed, top_p=0.1) in expected
        num_outside += not inside
    assert 0 < num_outside < 40


@pytest.mark.parametrize("p", [0.2, 0.6, 0.95])
@pytest.mark.parametrize("min_p", [0.01, 0.4])
def test_top_p_and_min_p_combine(p: float, min_p: float) -> None:
    knobs: dict[str, Any] = {"top_p": p, "min_p": min_p}
    for seed in range(20):
        logits = random_logits(1.5, seed=seed)
        threshold = logits.max() + np.log(min_p)
        kept = np.where(logits >= threshold, mask_top_p(logits, p), -np.inf)
        expected = draw(SamplingMethod("all"), kept, seed=seed)
        assert (
            draw(select_method(SamplingParams(**knobs), VOCAB), logits, seed=seed, **knobs)
            == expected
        )


@pytest.mark.parametrize("p", [0.3, 0.8])
def test_the_nucleus_within_top_k_counts_only_its_likelihoods(p: float) -> None:
    knobs: dict[str, Any] = {"top_k": 30, "top_p": p}
    for seed in range(20):
        logits = random_logits(1.0, step=0.25 * (seed % 2), seed=seed)
        expected = draw(SamplingMethod("all"), mask_top_p(mask_top_k(logits, 30), p), seed=seed)
        assert (
            draw(select_method(SamplingParams(**knobs), VOCAB), logits, seed=seed, **knobs)
            == expected
        )


@pytest.mark.parametrize("knobs", [{}, {"top_k": 9}, {"top_p": 0.4}, {"min_p": 0.2}], ids=str)
def test_rounding_of_logits_changes_no_draw_except_near_ties(knobs: dict[str, Any]) -> None:
    """A batch rounds differently from a single row, which must not change the draw."""
    method = select_method(SamplingParams(**knobs), VOCAB)
    changed = 0
    for seed in range(100):
        logits = random_logits(3.0, seed=seed)
        nudge = np.random.default_rng(seed).uniform(-1e-5, 1e-5, VOCAB).astype(np.float32)
        before = draw(method, logits, seed=seed, **knobs)
        changed += before != draw(method, logits + nudge, seed=seed, **knobs)
    assert changed == 0


@pytest.mark.parametrize("temperature", [1e-5, 1e30])
@pytest.mark.parametrize("knobs", [{}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
def test_no_temperature_overflows(temperature: float, knobs: dict[str, Any]) -> None:
    logits = np.array([-1e30, 3e38, 0.0, 2e38, -3e38])
    knobs = {"temperature": temperature, **knobs}
    token = draw(select_method(SamplingParams(**knobs), 5), logits, **knobs)
    assert token == 1 or temperature > 1


def invert_lowbias32(word: int) -> int:
    """The inverse of `lowbias32`."""
    word ^= word >> 16
    word = word * pow(0x846CA68B, -1, 1 << 32) % (1 << 32)
    word ^= word >> 15 ^ word >> 30
    word = word * pow(0x7FEB352D, -1, 1 << 32) % (1 << 32)
    return word ^ word >> 16


@pytest.mark.parametrize(
    ("hashed", "error"),
    [
        (0, 2e-6),
        (1, 2e-6),
        (1000, 2e-6),
        (1 << 31, 2e-6),
        (2**32 - 1000, 0.02),
        (2**32 - 1, 2e-6),
    ],
)
def test_noise_is_finite_at_both_ends_and_exact_where_it_is_large(
    hashed: int, error: float
) -> None:
    """The largest noise decides draws of unlikely ids; -log(-log(u)) alone would round it there.
    The smallest decides nothing, and is rounded."""
    keys = mx.array([[invert_lowbias32(hashed), 1]], dtype=mx.uint32)
    assert lowbias32(keys)[0, 0].item() == hashed
    u = min((hashed + 0.5) / 2**32, 1 - 2**-24)
    noise = make_noise(keys, mx.array([[0]], dtype=mx.uint32))
    assert noise.item() == pytest.approx(-np.log(-np.log1p(-u)), rel=2e-6, abs=error)


def test_noise_of_an_id_does_not_depend_on_the_other_ids() -> None:
    keys = mx.array([[5, 9], [70, 2**32 - 1]], dtype=mx.uint32)
    every = make_noise(keys, mx.arange(1000, dtype=mx.uint32)[None])
    some = mx.array([[999, 0, 3], [4, 4, 998]], dtype=mx.uint32)
    assert make_noise(keys, some).tolist() == mx.take_along_axis(every, some, axis=1).tolist()


def test_draws_with_close_starts_have_different_strides() -> None:
    """Among some thousand draws two start within a vocabulary of each other; with equal strides,
    one would have the noise of the other, shifted by a few ids."""
    starts = mx.array([[100, 0x9E3779B1], [103, 0x85EBCA77]], dtype=mx.uint32)
    noise = np.array(make_noise(starts, mx.arange(1000, dtype=mx.uint32)[None]))
    assert len(np.intersect1d(noise[0], noise[1])) < 10


def test_noise_has_a_gumbel_distribution() -> None:
    """A Kolmogorov-Smirnov distance above 1.95/sqrt(n) has a probability of one in a thousand."""
    keys = mx.array([[12, 34]], dtype=mx.uint32)
    noise = np.sort(np.array(make_noise(keys, mx.arange(200_000, dtype=mx.uint32)[None]))[0])
    ranks = (np.arange(len(noise)) + 0.5) / len(noise)
    assert abs(np.exp(-np.exp(-noise.astype(np.float64))) - ranks).max() < 1.95 / len(noise) ** 0.5


SEEDS, TURNS, IDS = 60, 50, 64


def ranks_of_noise() -> Any:
    """[SEEDS, TURNS, IDS] numbers of neighbouring seeds, turns and ids that should be uniform in
    (0, 1): the noise, through its distribution function."""
    rows = Draw(
        SamplingMethod("all"),
        [SamplingParams()] * SEEDS,
        seeds=list(range(SEEDS)),
        num_drawn=list(range(SEEDS)),
    )
    flat = mx.zeros((SEEDS, IDS))
    ids = mx.arange(IDS, dtype=mx.uint32)[None]
    noise = [np.array(rows._add_noise(flat, ids, turn)) for turn in range(TURNS)]
    return np.exp(-np.exp(-np.stack(noise, axis=1).astype(np.float64)))


def chi_square_deviation(observed: Any) -> float:
    """Pearson's chi-square of equal cells, in standard deviations from its mean."""
    expected = observed.sum() / observed.size
    chi = ((observed - expected) ** 2 / expected).sum()
    return float((chi - (observed.size - 1)) / np.sqrt(2 * (observed.size - 1)))


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seed", "turn", "id"])
@pytest.mark.parametrize("apart", [1, 2, 16])
def test_neighbouring_seeds_turns_and_ids_are_independent(axis: int, apart: int) -> None:
    u = np.moveaxis(ranks_of_noise(), axis, 0)
    joint, _, _ = np.histogram2d(
        u[:-apart].ravel(), u[apart:].ravel(), bins=16, range=[[0, 1], [0, 1]]
    )
    assert abs(chi_square_deviation(joint)) < 4


def test_no_two_draws_share_their_noise() -> None:
    """Also for rows with different seeds and numbers of draws: seed + draws is not enough."""
    noise = ranks_of_noise().reshape(-1, IDS)
    assert len(np.unique(noise[:, 0])) == len(noise)
    close = np.corrcoef(noise[:500])
    np.fill_diagonal(close, 0)
    # a correlation of 64 pairs deviates by 1/8; five and a half of these among 125,000
    assert abs(close).max() < 5.5 / 8


@pytest.mark.parametrize(
    "method", [SamplingMethod("all"), SamplingMethod("best", 64), SamplingMethod("nucleus", 63)]
)
def test_equal_ids_are_drawn_equally_often(method: SamplingMethod) -> None:
    knobs = {"best": {"top_k": 99}, "nucleus": {"top_p": 0.9999}}.get(method.kind, {})
    rows = Draw(
        method,
        [SamplingParams(**knobs)] * 400,
        seeds=[7 * s for s in range(400)],
        num_drawn=[0] * 400,
    )
    table = mx.zeros((400, 40))
    tokens = np.concatenate([np.array(rows(table, turn)) for turn in range(25)])
    assert abs(chi_square_deviation(np.bincount(tokens, minlength=40))) < 4


def test_seeds_are_taken_modulo_2_to_the_64() -> None:
    logits = random_logits(1.0)
    samples = [
        [draw(SamplingMethod("all"), logits, seed=seed, turn=turn) for turn in range(10)]
        for seed in (-1, 2**64 - 1, 0, 1, 2**63)
    ]
    assert samples[0] == samples[1]
    assert len({tuple(tokens) for tokens in samples}) == 4
