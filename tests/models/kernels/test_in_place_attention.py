"""Keys and values are written in place only if no other array reads the buffer.

As in the engine loop, a step is dispatched before the previous one has finished, copies are taken
in between, and rows are dropped during evaluation. A write to memory that is still read, or memory
freed before it is written, would give wrong results in some runs.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import kernels
from models.batch_cache import BatchKVCache
from models.kernels.in_place_attention import attend_in_place
from models.kv import KVCache
from models.rotating_kv import RotatingKVCache
from models.sdpa import scaled_dot_product_attention

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")

# large enough that a step takes longer than the dispatch of the next, and uses two threads
HEADS, GROUP, DIM = 4, 3, 64
SCALE = DIM**-0.5
LENGTH = 1500


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    before = OPS.num_threads()
    OPS.set_num_threads(2)
    yield
    mx.synchronize()
    OPS.set_num_threads(before)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Queries, keys and values at each position of a sequence."""

    queries: mx.array
    keys: mx.array
    values: mx.array


@pytest.fixture(scope="module")
def inputs() -> list[Inputs]:
    return [make_inputs(seed) for seed in range(3)]


def make_inputs(seed: int) -> Inputs:
    rng = np.random.default_rng(seed)

    def draw(heads: int) -> mx.array:
        return mx.array(rng.standard_normal((1, heads, LENGTH, DIM)).astype(np.float32))

    return Inputs(queries=draw(HEADS * GROUP), keys=draw(HEADS), values=draw(HEADS))


@dataclass(kw_only=True)
class Row:
    """inputs: source of the next positions. It changes after a trim, so that new values differ from
    the overwritten ones. history: copies of all keys and values so far."""

    inputs: Inputs
    cache: KVCache = field(default_factory=KVCache)
    history: tuple[mx.array, ...] = ()

    def next(self, count: int) -> tuple[mx.array, mx.array, mx.array]:
        """The next `count` queries, keys and values; appends to the history."""
        offset = self.cache.offset
        at = slice(offset, offset + count)
        new = self.inputs.keys[:, :, at], self.inputs.values[:, :, at]
        self.history = tuple(
            mx.concatenate([old[:, :, :offset], more], axis=2)
            for old, more in zip(self.history or new, new, strict=True)
        )
        return self.inputs.queries[:, :, at], *new

    def attend(self, queries: mx.array) -> mx.array:
        keys, values = self.history
        return scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask="causal")


@dataclass(kw_only=True)
class Check:
    """An array that is compared with `expected` at the end."""

    array: mx.array
    expected: mx.array

    def is_unchanged(self) -> bool:
        return np.array_equal(np.array(self.array), np.array(self.expected))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_later_writes_do_not_change_arrays_read_from_a_cache(
    inputs: list[Inputs], seed: int
) -> None:
    """Copies, slices and views of a buffer, evaluated at once, later, or at the end."""
    rng, checks = random.Random(seed), list[Check]()
    rows = [Row(inputs=rng.choice(inputs)) for _ in range(3)]
    for row in rows:
        checks += attend_next(row, rng.choice([1, 40, 300]))
    for _ in range(40):
        row = rng.choice(rows)
        cache = row.cache
        match rng.choice("aaaaabbbccctttvfp"):
            case "a":
                checks += attend_next(row, rng.choice([1, 1, 1, 5, 60]))
            case "b":
                checks += attend_batch(rows)
            case "c" | "f":  # the copy replaces another row
                twin = cache.copy()
                if rng.random() < 0.5:
                    mx.async_eval(twin.state())
                other = Row(inputs=rng.choice(inputs), cache=twin, history=row.history)
                checks += view_cache(other)
                rows[rng.randrange(3)] = other
            case "t":
                checks += view_cache(row)
                cache.trim(rng.randrange(min(50, cache.offset)))
                row.inputs = rng.choice(inputs)
            case "v":
                checks += view_cache(row)
            case _:
                cut = rng.randrange(cache.offset)
                checks += view_cache(
                    Row(inputs=row.inputs, cache=cache.slice(0, cut), history=row.history)
                )
        if rng.random() < 0.7:
            mx.async_eval([row.cache.state() for row in rows])
        if rng.random() < 0.3 and checks:
            mx.async_eval(rng.choice(checks).array)
        if rng.random() < 0.1 and checks:  # drop the array, perhaps during its evaluation
            checks.pop(rng.randrange(len(checks)))
    for row in rows:
        checks += view_cache(row)
    assert all(one.is_unchanged() for one in checks)


def attend_next(row: Row, count: int) -> list[Check]:
    if row.cache.offset + count > LENGTH:
        return []
    queries, keys, values = row.next(count)
    out = row.cache.attend(queries, keys, values, scale=SCALE)
    return [Check(array=out, expected=row.attend(queries))]


def attend_batch(rows: list[Row]) -> list[Check]:
    offsets = [row.cache.offset for row in rows]
    if max(offsets) >= LENGTH:
        return []
    each = [row.next(1) for row in rows]
    parts = [mx.concatenate(list(part)) for part in zip(*each, strict=True)]
    together = BatchKVCache([row.cache for row in rows], mx.array(offsets))
    out = together.attend(*parts, scale=SCALE)
    seen = [row.attend(queries) for row, (queries, _, _) in zip(rows, each, strict=True)]
    return [Check(array=out, expected=mx.concatenate(seen))]


def view_cache(row: Row) -> list[Check]:
    """Views of the current content of the cache."""
    end = row.cache.offset
    return [
        Check(array=array[..., :end, :], expected=history[..., :end, :])
        for array, history in zip(row.cache.state(), row.history, strict=False)
    ]


def test_steps_write_to_the_cache_in_place(inputs: list[Inputs]) -> None:
    """Otherwise each step would copy the whole cache. The next step also writes in place during the
    evaluation of the last one, but copies if MLX releases the last reference late."""
    row = Row(inputs=inputs[0])
    row.cache.reserve(LENGTH)
    attend_next(row, 200)
    places: list[int] = []
    for _ in range(40):
        for _ in range(2):
            queries, keys, values = row.next(1)
            out = row.cache.attend(queries, keys, values, scale=SCALE)
            mx.async_eval(out, row.cache.state())
        mx.synchronize()
        places.append(np.array(row.cache.state()[0], copy=False).ctypes.data)
    moved = sum(one != next for one, next in pairwise(places))
    assert moved <= 10


def test_a_buffer_with_a_numpy_view_is_copied(inputs: list[Inputs]) -> None:
    row = Row(inputs=inputs[0])
    attend_next(row, 10)
    mx.eval(row.cache.state())
    looked_at = np.array(row.cache.state()[0], copy=False)
    before = looked_at.copy()
    row.cache.trim(5)
    other = Row(inputs=inputs[1], cache=row.cache)
    mx.eval(attend_next(other, 3)[0].array, row.cache.state())
    assert np.array_equal(looked_at, before)


@pytest.mark.parametrize("count", [1, 7])
def test_rows_dropped_during_evaluation_do_not_write_to_freed_memory(
    inputs: list[Inputs], count: int
) -> None:
    """The next arrays get their memory, so no pending step may write to it."""
    for _ in range(30):
        row = Row(inputs=inputs[0])
        attend_next(row, 400)
        mx.async_eval(row.cache.state())
        attend_next(row, count)
        mx.async_eval(row.cache.state())
        del row
        size = (1, HEADS, 512, DIM)
        others = [mx.full(size, float(i)) for i in range(6)]
        mx.async_eval(others)
        assert all(mx.all(other == i).item() for i, other in enumerate(others))


class TestUnsupportedCases:
    """`attend_in_place` returns None and changes nothing."""

    def parts(self, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
        return [mx.ones((1, heads, 2, DIM), dtype) for heads in (HEADS * GROUP, HEADS, HEADS)]

    def attend(self, cache: Any, parts: list[mx.array]) -> mx.array | None:
        return attend_in_place([cache], *parts, scale=SCALE, sinks=None, softcap=None)

    def test_other_types(self) -> None:
        cache = KVCache()
        assert self.attend(cache, self.parts(mx.bfloat16)) is None
        assert (cache.offset, cache.state()) == (0, [])

    def test_several_sequences_in_one_cache(self) -> None:
        cache = KVCache()
        parts = [mx.concatenate([part, part]) for part in self.parts()]
        assert self.attend(cache, parts) is None
        assert (cache.offset, cache.state()) == (0, [])

    def test_caches_without_in_place_writes(self) -> None:
        class NotInPlace(KVCache):
            supports_in_place = False

        assert self.attend(NotInPlace(), self.parts()) is None

    def test_other_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        assert self.attend(KVCache(), self.parts()) is None

    def test_other_cases_are_supported(self) -> None:
        assert self.attend(KVCache(), self.parts()) is not None
        assert self.attend(RotatingKVCache(3), self.parts()) is not None
