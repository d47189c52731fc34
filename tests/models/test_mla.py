"""Multi-head latent attention: the cache, and linear layers with a matrix per head."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.base import ModelError
from models.kv import STEP
from models.mla import LatentCache, MultiLinear, split_kv_b_proj
from models.rope import make_rope
from tests.models import parity

HEADS, LATENT, ROTARY = 3, 32, 16


def draw_array(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def fill_cache(length: int) -> LatentCache:
    cache = LatentCache()
    cache.update(draw_array(1, 1, 1, length, ROTARY), draw_array(2, 1, 1, length, LATENT))
    return cache


def attend(cache: LatentCache, length: int, *, seed: int = 0) -> np.ndarray:
    """Attention output of `length` new queries."""
    return np.array(
        cache.attend(
            draw_array(seed + 3, 1, HEADS, length, LATENT + ROTARY),
            draw_array(seed + 4, 1, 1, length, ROTARY),
            draw_array(seed + 5, 1, 1, length, LATENT),
            scale=0.3,
        )
    )


@pytest.mark.parametrize(("before", "length"), [(0, 1), (0, 5), (7, 1), (7, 4)])
def test_queries_attend_to_visible_latents(before: int, length: int) -> None:
    keys = np.concatenate(
        [np.array(draw_array(1, before, ROTARY)), np.array(draw_array(4, length, ROTARY))]
    )
    latents = np.concatenate(
        [np.array(draw_array(2, before, LATENT)), np.array(draw_array(5, length, LATENT))]
    )
    queries = np.array(draw_array(3, HEADS, length, LATENT + ROTARY))
    scores = 0.3 * queries @ np.concatenate([latents, keys], axis=1).T
    hidden = np.arange(before + length) > np.arange(before, before + length)[:, None]
    weights = np.exp(np.where(hidden, -np.inf, scores))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ latents
    np.testing.assert_allclose(attend(fill_cache(before), length)[0], expected, atol=1e-4)


def test_the_cache_has_one_latent_and_one_rotary_key_per_position() -> None:
    cache = fill_cache(STEP)
    assert cache.nbytes == STEP * (LATENT + ROTARY) * 4
    assert cache.estimate_nbytes(10 * STEP, STEP) == 10 * cache.nbytes
    assert cache.sliceable


@given(
    length=st.integers(1, 40),
    cut=st.integers(0, 40),
    kept=st.integers(0, 40),
    new=st.integers(1, 4),
)
def test_joined_slices_equal_the_original(length: int, cut: int, kept: int, new: int) -> None:
    full, cut = fill_cache(length), min(cut, length)
    pieces = LatentCache()
    pieces.reserve(length + new)
    pieces.append(full.slice(0, cut), 0, cut)
    pieces.append(full, cut, length)
    trimmed = full.copy()
    trimmed.append(fill_cache(kept + 1), 0, kept)
    trimmed.trim(kept)
    for cache in (pieces, trimmed):
        assert isinstance(cache, LatentCache)
        np.testing.assert_array_equal(attend(cache, new), attend(full.copy(), new))


def test_each_row_of_a_batch_attends_as_it_would_alone() -> None:
    rows = [fill_cache(3), fill_cache(9)]
    expected = [attend(row.copy(), 1, seed=10 * at) for at, row in enumerate(rows)]
    together = rows[0].make_batch(rows, mx.array([3, 9]))
    new = [
        mx.concatenate([draw_array(10 * at + n, 1, heads, 1, size) for at in range(2)])
        for n, heads, size in ((3, HEADS, LATENT + ROTARY), (4, 1, ROTARY), (5, 1, LATENT))
    ]
    got = together.attend(*new, scale=0.3)
    np.testing.assert_allclose(np.array(got), np.concatenate(expected), atol=1e-6)


def test_remove_rerotates_keys_and_moves_latents_unchanged() -> None:
    rope = make_rope(dims=ROTARY, theta=10000.0, max_positions=64, traditional=True)
    keys, latents = draw_array(1, 1, 1, 12, ROTARY), draw_array(2, 1, 1, 12, LATENT)
    cache = LatentCache()
    cache.update(rope(keys, 0), latents)
    cache.remove(3, 7, rope.rerotate)
    left = [at for at in range(12) if not 3 <= at < 7]
    expected = LatentCache()
    expected.update(rope(keys[:, :, left], 0), latents[:, :, left])
    assert cache.offset == expected.offset == 8
    np.testing.assert_allclose(attend(cache, 2), attend(expected, 2), atol=1e-5)


@pytest.mark.parametrize("kind", [None, *parity.KINDS])
def test_a_map_and_its_transpose_agree(kind: str | None) -> None:
    """The product of a mapped query with x equals the product of the query with the transposed map
    of x, and both equal the products with the weights."""
    holder: Any = nn.Module()
    holder.map = MultiLinear(64, 32, HEADS)
    holder.map.weight = weight = draw_array(0, HEADS, 32, 64)
    if kind is not None:
        nn.quantize(holder, **parity.KINDS[kind])
        parts: Any = (holder.map.weight, holder.map.scales, holder.map.get("biases"))
        weight = mx.dequantize(*parts, **parity.KINDS[kind], dtype=mx.float32)
    queries, x = draw_array(1, 2, HEADS, 5, 64), draw_array(2, 2, 1, 7, 32)
    mapped, back = holder.map(queries), holder.map.apply_transposed(x)
    assert back.shape == (2, HEADS, 7, 64)
    np.testing.assert_allclose(
        np.array(mapped), np.array(queries) @ np.array(weight).swapaxes(1, 2), atol=1e-3
    )
    np.testing.assert_allclose(
        np.array(mapped @ x.swapaxes(-1, -2)),
        np.array(queries @ back.swapaxes(-1, -2)),
        atol=1e-3,
    )


def test_the_published_map_is_split_into_keys_and_values_of_each_head() -> None:
    weight = draw_array(0, HEADS * (64 + 32), LATENT)
    halves = split_kv_b_proj("a", {"a.weight": weight}, heads=HEADS, key_dim=64, latent_dim=LATENT)
    stored = weight.reshape(HEADS, 96, LATENT)
    assert halves.keys() == {"embed_q.weight", "unembed_out.weight"}
    assert mx.array_equal(halves["embed_q.weight"], stored[:, :64].swapaxes(1, 2))
    assert mx.array_equal(halves["unembed_out.weight"], stored[:, 64:])


@pytest.mark.parametrize("kind", ["affine-4", "affine-6", "mxfp4", "mxfp8", "nvfp4"])
def test_a_quantized_map_is_split_exactly_and_transposed_with_a_small_error(kind: str) -> None:
    settings: Any = parity.KINDS[kind]
    names = ("weight", "scales", "biases")
    packed: Any = mx.quantize(draw_array(0, HEADS * (64 + 32), LATENT), **settings)
    stored = {f"a.{name}": array for name, array in zip(names, packed, strict=False)}
    halves = split_kv_b_proj("a", stored, heads=HEADS, key_dim=64, latent_dim=LATENT)
    exact = mx.dequantize(*packed, **settings, dtype=mx.float32).reshape(HEADS, 96, LATENT)

    def dequantize(path: str) -> mx.array:
        parts: Any = [halves[f"{path}.{name}"] for name in names if f"{path}.{name}" in halves]
        assert len(parts) == len(packed)
        return mx.dequantize(*parts, **settings, dtype=mx.float32)

    assert mx.array_equal(dequantize("unembed_out"), exact[:, 64:])
    # the error is not larger than that of the first quantization
    again: Any = mx.quantize(exact[:, :64].swapaxes(1, 2), **settings)
    assert mx.array_equal(
        dequantize("embed_q"), mx.dequantize(*again, **settings, dtype=mx.float32)
    )


def test_the_transpose_is_unquantized_if_groups_do_not_divide_its_width() -> None:
    packed = mx.quantize(draw_array(0, HEADS * (48 + 32), 64), group_size=64, bits=8)
    kinds = ("weight", "scales", "biases")
    stored = {f"a.{kind}": array for kind, array in zip(kinds, packed, strict=True)}
    halves = split_kv_b_proj("a", stored, heads=HEADS, key_dim=48, latent_dim=64)
    exact = mx.dequantize(*packed, group_size=64, bits=8).reshape(HEADS, 80, 64)
    assert "embed_q.scales" not in halves
    assert mx.array_equal(halves["embed_q.weight"], exact[:, :48].swapaxes(1, 2))


def test_a_map_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ModelError, match=r"a\.weight cannot be divided among 3 heads"):
        split_kv_b_proj("a", {"a.weight": mx.ones((10, 4))}, heads=3, key_dim=2, latent_dim=4)
