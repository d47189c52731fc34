"""Slabs: attention equals that of separate caches, and the stored numbers are the same bits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from models.kv import KVCache
from models.mla import LatentCache
from models.mlx_lm_cache import MlxLmKVCache
from models.recurrent import RecurrentCache
from models.rotating_kv import RotatingKVCache
from models.slab_step import LayerSlab, SlabRow, SlabStep
from models.slabs import create_slab, fits_buffers, slab_bytes, supports_slab
from tests.models.kernel_switch import BOTH, use_kernels

HEADS, GROUP, DIM, WINDOW = 2, 3, 8, 7
KINDS: Mapping[str, Callable[[], Any]] = {
    "all": KVCache,
    "window": lambda: RotatingKVCache(WINDOW),
    "latent": LatentCache,
}
NEAR = 1e-5


def numbers(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def inputs(rng: np.random.Generator, kind: str, rows: int, length: int) -> list[mx.array]:
    """Queries, keys and values."""
    if kind == "latent":
        return [
            numbers(rng, rows, HEADS, length, 2 * DIM),
            numbers(rng, rows, 1, length, DIM),
            numbers(rng, rows, 1, length, DIM),
        ]
    heads = (HEADS * GROUP, HEADS, HEADS)
    return [numbers(rng, rows, count, length, DIM) for count in heads]


def prefill(rng: np.random.Generator, kind: str, length: int, dtype: Any) -> Any:
    cache = KINDS[kind]()
    cache.set_dtype(dtype)
    cache.attend(*inputs(rng, kind, 1, length), scale=0.3)
    return cache


def latest(cache: Any) -> list[np.ndarray[Any, Any]]:
    count = min(cache.offset, WINDOW if isinstance(cache, RotatingKVCache) else cache.offset)
    return [np.array(array.astype(mx.float32)) for array in cache.latest(count)]


def make_step(slots: Mapping[int, int | None], caches: Sequence[Any]) -> SlabStep:
    """The rows of a step, by their numbers, with the offsets of the reference caches."""
    return SlabStep(
        [SlabRow(key=i, slot=slot, offset=caches[i].offset) for i, slot in slots.items()]
    )


@pytest.mark.parametrize("enabled", BOTH)
@pytest.mark.parametrize("kind", KINDS)
@examples(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    dtype=st.sampled_from([None, mx.float16, mx.bfloat16]),
    extras=st.sampled_from(["", "sinks", "softcap"]),
    rounds=st.lists(
        st.tuples(st.permutations(range(5)), st.integers(1, 5), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    ),
    separate=st.booleans(),
)
def test_a_slab_computes_what_separate_caches_compute(
    kind: str,
    enabled: bool,
    lengths: list[int],
    dtype: mx.Dtype | None,
    extras: str,
    rounds: list[tuple[list[int], int, int]],
    separate: bool,
) -> None:
    """In each round, some rows join any slots, compute a few positions and leave. With `separate`,
    the last row of a round has no slot."""
    rng = np.random.default_rng(sum(lengths))
    options: dict[str, Any] = {"scale": 0.3}
    if extras == "sinks" and kind != "latent":
        options["sinks"] = numbers(rng, HEADS * GROUP)
    if extras == "softcap" and kind != "latent":
        options["softcap"] = 2.0
    with use_kernels(enabled=enabled):
        caches = [prefill(rng, kind, length, dtype) for length in lengths]
        alone = [cache.copy() for cache in caches]
        slab = create_slab(caches[0])
        slab.grow(2, 8)
        written = [0] * 5
        for places, count, steps in rounds:
            rows = sorted(zip(places, range(min(count, len(caches))), strict=False))
            slots: dict[int, int | None] = {row: slot for slot, row in rows}
            if separate:
                slots[rows[-1][1]] = None
            slab.grow(5, 64)
            for row, slot in slots.items():
                if slot is not None:
                    slab.join(slot, caches[row], clear_to=written[slot])
            for _ in range(steps):
                step = make_step(slots, alone)
                given = inputs(rng, kind, len(slots), 1)
                batch: Any = slab.make_batch(step, [caches[row] for row in slots])
                got = batch.attend(*given, **options)
                want = [
                    alone[row].attend(*(array[i : i + 1] for array in given), **options)
                    for i, row in enumerate(slots)
                ]
                np.testing.assert_allclose(
                    np.array(got), np.array(mx.concatenate(want)), atol=NEAR, rtol=1e-4
                )
                if extras == "" and kind != "latent":
                    # another layer with the same queries
                    shared = batch.attend_shared(given[0], scale=0.3)
                    np.testing.assert_array_equal(np.array(shared), np.array(got))
            for row, slot in slots.items():
                if slot is not None:
                    written[slot] = max(written[slot], alone[row].offset)
                slab.copy_out(SlabRow(key=row, slot=slot, offset=alone[row].offset), caches[row])
                assert caches[row].offset == alone[row].offset
                for stored, expected in zip(latest(caches[row]), latest(alone[row]), strict=True):
                    np.testing.assert_array_equal(stored, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slab_has_the_estimated_size(kind: str) -> None:
    rng = np.random.default_rng(0)
    cache = prefill(rng, kind, 5, None)
    slab = create_slab(cache)
    assert slab.nbytes == 0
    for slots, capacity in ((2, 4), (3, 4), (4, 32)):
        slab.grow(slots, capacity)
        assert slab.nbytes == slab_bytes(cache, slots, capacity, rows=99)


def make_recurrent(value: float, offset: int) -> RecurrentCache:
    cache = RecurrentCache(2)
    cache[0], cache[1] = mx.full((1, 3), value), mx.full((1, 2, 2), -value)
    cache.advance(offset)
    return cache


def advance(slab: LayerSlab, step: SlabStep, caches: Sequence[RecurrentCache]) -> None:
    batch: Any = slab.make_batch(step, caches)
    for slot in range(2):
        batch[slot] = batch[slot] * 10
    batch.advance(1)


def test_recurrent_states_stay_batched() -> None:
    caches = [make_recurrent(value, offset=5) for value in (1, 2, 3)]
    slab = create_slab(caches[0])
    slots: dict[int, int | None] = {0: 0, 1: 1, 2: None}
    advance(slab, make_step(slots, caches), caches)
    before = slab.state()
    batch: Any = slab.make_batch(make_step(slots, caches), caches)
    assert all(batch[slot] is state for slot, state in enumerate(before)), "nothing is copied"
    assert slab.nbytes == slab_bytes(caches[0], slots=99, capacity=99, rows=3)
    # another order, and one row less
    slab.leave(1)
    advance(slab, make_step({2: None, 0: 0}, caches), [caches[2], caches[0]])
    slab.copy_out(SlabRow(key=0, slot=0, offset=7), caches[0])
    assert caches[0].offset == 7
    assert caches[0][0].tolist() == [[100, 100, 100]]  # type: ignore[union-attr]
    assert caches[2][0].tolist() == [[3, 3, 3]], "unchanged until it is copied out"  # type: ignore[union-attr]
    slab.copy_out(SlabRow(key=2, slot=None, offset=7), caches[2])
    assert caches[2][1].tolist() == [[[-300, -300], [-300, -300]]]  # type: ignore[union-attr]


def test_a_recurrent_row_may_leave_and_join_again() -> None:
    caches = [make_recurrent(value, offset=5) for value in (1, 2)]
    slab = create_slab(caches[0])
    advance(slab, make_step({0: 0, 1: 1}, caches), caches)
    slab.leave(0)
    advance(slab, make_step({0: 0, 1: 1}, caches), caches)
    slab.copy_out(SlabRow(key=0, slot=0, offset=6), caches[0])
    assert caches[0][0].tolist() == [[10, 10, 10]], "from its own cache"  # type: ignore[union-attr]


def test_only_our_caches_with_content_have_slabs() -> None:
    rng = np.random.default_rng(0)
    assert not supports_slab(KVCache())
    assert not supports_slab(RecurrentCache(2))
    assert not supports_slab(MlxLmKVCache())  # type: ignore[arg-type]
    for kind in KINDS:
        assert supports_slab(prefill(rng, kind, 3, None))
    assert supports_slab(make_recurrent(1, 1))


def test_a_buffer_has_at_most_as_many_numbers_as_an_index_reaches() -> None:
    cache = prefill(np.random.default_rng(0), "all", 3, None)
    places = 2**31 // (HEADS * DIM)
    assert fits_buffers(cache, 1, places - 1)
    assert not fits_buffers(cache, 1, places)
    assert fits_buffers(make_recurrent(1, 1), 1, places)
