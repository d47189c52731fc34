"""Batched decoding: each row gets the result that it would get alone."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from models import kernels
from models.base import Model
from models.batch_cache import PackedKVCache
from models.kv import KVCache, LayerCache
from models.recurrent import RecurrentCache
from models.rotating_kv import RotatingKVCache
from tests.engine import hybrid
from tests.engine.harness import tiny_model
from tests.models.kernel_switch import BOTH, use_kernels

NEAR = 1e-5

MODELS: dict[str, Any] = {
    "llama": tiny_model,
    "hybrid": hybrid.Model,
    "windowed": lambda: hybrid.Model(kinds="wk"),
}

Prompts = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=12), min_size=1, max_size=5)


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


def prefill(model: Model, prompts: Sequence[Sequence[int]]) -> list[list[LayerCache]]:
    kvs = [model.make_kv() for _ in prompts]
    for kv, prompt in zip(kvs, prompts, strict=True):
        mx.eval(model(mx.array([prompt]), kv))
    return kvs


def make_batch(kvs: Sequence[Sequence[LayerCache]], offsets: list[int]) -> list[object]:
    layers = zip(*kvs, strict=True)
    return [layer[0].make_batch(layer, mx.array(offsets)) for layer in layers]


@examples(max_examples=30, deadline=None)
@given(prompts=Prompts, steps=st.integers(1, 8))
def test_batched_decoding_equals_decoding_alone(
    model: Model, prompts: list[list[int]], steps: int
) -> None:
    """Rows of any lengths, past their windows: each row has its own positions, masks and states."""
    batched, alone = prefill(model, prompts), prefill(model, prompts)
    for step in range(steps):
        tokens = mx.array([[(7 * step + row) % 256] for row in range(len(prompts))])
        offsets = [len(prompt) + step for prompt in prompts]
        side_by_side = model(tokens, make_batch(batched, offsets))
        one_by_one = [model(tokens[row : row + 1], kv) for row, kv in enumerate(alone)]
        np.testing.assert_allclose(
            np.array(side_by_side), np.array(mx.concatenate(one_by_one)), atol=NEAR
        )
    assert [kv[0].offset for kv in batched] == [kv[0].offset for kv in alone]


def test_a_row_keeps_its_caches_when_it_leaves_the_batch(model: Model) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    batched, alone = prefill(model, prompts), prefill(model, prompts)
    for step, rows in enumerate([(0, 1, 2), (0, 2), (2,), (1, 2)]):
        tokens = mx.array([[10 + step + row] for row in rows])
        offsets = [batched[row][0].offset for row in rows]
        got = model(tokens, make_batch([batched[row] for row in rows], offsets))
        for i, row in enumerate(rows):
            want = model(tokens[i : i + 1], alone[row])
            np.testing.assert_allclose(np.array(got[i : i + 1]), np.array(want), atol=NEAR)


def test_a_join_or_leave_copies_no_buffers_of_other_rows() -> None:
    """Steps with changing rows do not increase the memory in use."""
    model = tiny_model()
    kvs = prefill(model, [[1, 2, 3], [4, 5], [6]])
    before = mx.get_active_memory()
    for rows in [(0, 1, 2), (0, 2), (0, 1, 2), (1,)]:
        offsets = [kvs[row][0].offset for row in rows]
        out = model(mx.array([[1]] * len(rows)), make_batch([kvs[row] for row in rows], offsets))
        mx.eval(out, [layer.state() for kv in kvs for layer in kv])
        del out
    assert mx.get_active_memory() <= before + 4096


def test_recurrent_rows_start_without_a_state() -> None:
    rows = [RecurrentCache(1), RecurrentCache(1)]
    assert rows[0].make_batch(rows, mx.array([0, 0]))[0] is None


HEADS, GROUP, DIM, WINDOW = 2, 3, 8, 7
CACHES: dict[str, Any] = {"all": KVCache, "window": lambda: RotatingKVCache(WINDOW)}


def draw(rng: np.random.Generator, rows: int, heads: int, length: int) -> mx.array:
    return mx.array(rng.standard_normal((rows, heads, length, DIM)).astype(np.float32))


def attend(cache: Any, rng: np.random.Generator, rows: int, length: int) -> tuple[Any, Any]:
    """Returns queries, and their attention after the keys and values were appended."""
    queries = draw(rng, rows, HEADS * GROUP, length)
    keys, values = (draw(rng, rows, HEADS, length) for _ in range(2))
    return queries, cache.attend(queries, keys, values, scale=0.3)


def assert_shared(cache: Any, queries: mx.array, seen: mx.array) -> None:
    """Another layer with the same queries gets the same attention to the same keys."""
    np.testing.assert_array_equal(np.array(cache.attend_shared(queries, scale=0.3)), np.array(seen))


@pytest.mark.parametrize("enabled", BOTH)
@pytest.mark.parametrize("dtype", [None, mx.bfloat16])
@pytest.mark.parametrize("kind", CACHES)
@examples(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_a_layer_can_attend_to_the_keys_of_another_one(
    kind: str, dtype: Any, enabled: bool, lengths: list[int]
) -> None:
    """In chunks and single steps, past the end of the window, and for the last query alone."""
    rng = np.random.default_rng(len(lengths))
    with use_kernels(enabled=enabled):
        cache = CACHES[kind]()
        cache.set_dtype(dtype)
        for length in lengths:
            queries, seen = attend(cache, rng, 1, length)
            state = [np.array(array.astype(mx.float32)) for array in cache.written()]
            assert_shared(cache, queries, seen)
            last = cache.attend_shared(queries[:, :, -1:], scale=0.3)
            np.testing.assert_allclose(np.array(last), np.array(seen[:, :, -1:]), atol=NEAR)
            for before, array in zip(state, cache.written(), strict=True):
                np.testing.assert_array_equal(np.array(array.astype(mx.float32)), before)


@pytest.mark.parametrize("enabled", BOTH)
@pytest.mark.parametrize("kind", CACHES)
def test_rows_of_a_batch_attend_to_the_keys_of_another_layer(kind: str, enabled: bool) -> None:
    rng = np.random.default_rng(0)
    with use_kernels(enabled=enabled):
        rows = [CACHES[kind]() for _ in range(3)]
        for row, length in zip(rows, (3, 1, 12), strict=True):
            mx.eval(attend(row, rng, 1, length)[1])
        for _ in range(5):
            offsets = mx.array([row.offset for row in rows])
            batch = rows[0].make_batch(rows, offsets)
            assert_shared(batch, *attend(batch, rng, 3, 1))
        packed = PackedKVCache(rows, [2, 1, 4], mx.arange(7))
        assert_shared(packed, *attend(packed, rng, 7, 1))


def test_a_buffer_is_written_in_place_after_another_layer_read_it() -> None:
    """Although the work that reads it may be in flight."""
    if kernels.ops() is None:
        pytest.skip("no kernels")
    cache, rng = KVCache(), np.random.default_rng(0)
    cache.reserve(4096)
    mx.eval(attend(cache, rng, 1, 4)[1], cache.state())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(20):
        queries, seen = attend(cache, rng, 1, 1)
        mx.async_eval(cache.attend_shared(queries, scale=0.3), seen, cache.state())
    mx.synchronize()
    assert mx.get_peak_memory() - before < cache.nbytes // 2
