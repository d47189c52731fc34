"""Our caches as replacements of mlx-lm's."""

from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as theirs
import numpy as np
import pytest

from models.base import ModelError
from models.mlx_lm_cache import (
    MlxLmArraysCache,
    MlxLmKVCache,
    MlxLmLayerCache,
    MlxLmRotatingKVCache,
)
from tests.rows import rows

WINDOW = 5


@rows("return_array", [False, True])
@rows("length", [1, 2, WINDOW, 9])
@rows("before", [0, 1, WINDOW - 1, WINDOW, 12])
@rows("kind", ["unbounded", "unbounded-with-window", "window", "its-own-window"])
def test_masks_equal_those_of_mlx_lm(
    kind: str, before: int, length: int, return_array: bool
) -> None:
    unbounded = kind.startswith("unbounded")
    ours: Any = MlxLmKVCache() if unbounded else MlxLmRotatingKVCache(WINDOW)
    reference: Any = theirs.KVCache() if unbounded else theirs.RotatingKVCache(WINDOW)
    for position in range(before):
        array = mx.full((1, 1, 1, 2), position)
        for cache in (ours, reference):
            cache.update_and_fetch(array, array)
    window = None if kind in ("unbounded", "window") else WINDOW
    got, expected = (
        cache.make_mask(length, return_array=return_array, window_size=window)
        for cache in (ours, reference)
    )
    assert type(got) is type(expected)
    np.testing.assert_array_equal(np.array(got), np.array(expected))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_that_differs_from_its_cache_is_refused(change: int) -> None:
    with pytest.raises(ModelError, match=f"of {WINDOW + change} positions with a cache of"):
        MlxLmRotatingKVCache(WINDOW).make_mask(1, window_size=WINDOW + change)


@pytest.mark.parametrize(
    "make",
    [MlxLmKVCache, lambda: MlxLmRotatingKVCache(WINDOW), lambda: MlxLmArraysCache(1)],
    ids=["unbounded", "window", "states"],
)
def test_a_copy_is_equal_and_independent(make: Any) -> None:
    cache = make()
    array = mx.arange(6.0).reshape(1, 1, 3, 2)

    def add(to: Any, more: mx.array) -> None:
        if isinstance(to, MlxLmArraysCache):
            to[0] = more
            to.advance(3)
        else:
            to.update_and_fetch(more, more)

    add(cache, array)
    twin = cache.copy()
    assert type(twin) is type(cache)
    before = [np.array(one) for one in twin.state()]
    add(cache, array + 100)
    assert (twin.offset, cache.offset) == (3, 6)
    for one, same in zip(twin.state(), before, strict=True):
        np.testing.assert_array_equal(np.array(one), same)


def test_several_caches_of_a_layer_are_sliceable_if_each_is() -> None:
    assert MlxLmLayerCache([MlxLmKVCache(), MlxLmKVCache()], is_cache_list=True).sliceable
    assert not MlxLmLayerCache([MlxLmKVCache(), MlxLmArraysCache(1)], is_cache_list=True).sliceable
    assert not MlxLmLayerCache([MlxLmRotatingKVCache(WINDOW)], is_cache_list=False).sliceable


def test_a_state_does_not_retain_the_chunk_that_it_is_a_slice_of() -> None:
    state = MlxLmArraysCache(1)
    before = mx.get_active_memory()
    chunk = mx.zeros((1, 4096, 256)) + 1
    mx.eval(chunk)
    state[0] = chunk[:, -3:]
    mx.eval(state.state())
    del chunk
    assert mx.get_active_memory() - before < 1 << 20
