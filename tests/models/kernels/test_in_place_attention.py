"""Keys and values are written where they lie only while nobody else is to read what was there.

A step is dispatched before the one ahead of it is done, copies are taken in between, rows are
forgotten while they are worked on: as the engine's loop does it. Had memory been written to that
somebody still reads, or given away that is still written to, numbers would be wrong now and then.
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

# so much that a step takes longer than to dispatch the next, and is worth two threads
HEADS, GROUP, DIM = 4, 3, 64
SCALE = DIM**-0.5
TEXT = 1500


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    before = OPS.threads()
    OPS.use_threads(2)
    yield
    mx.synchronize()
    OPS.use_threads(before)


@dataclass(frozen=True, kw_only=True)
class Text:
    """What a sequence may say, at each position."""

    queries: mx.array
    keys: mx.array
    values: mx.array


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return [text(seed) for seed in range(3)]


def text(seed: int) -> Text:
    rng = np.random.default_rng(seed)

    def drawn(heads: int) -> mx.array:
        return mx.array(rng.standard_normal((1, heads, TEXT, DIM)).astype(np.float32))

    return Text(queries=drawn(HEADS * GROUP), keys=drawn(HEADS), values=drawn(HEADS))


@dataclass(kw_only=True)
class Row:
    """text: what it says next, which is another after a step back: what is written then differs
    from what lay there. said: all keys and values so far, in arrays of their own."""

    text: Text
    cache: KVCache = field(default_factory=KVCache)
    said: tuple[mx.array, ...] = ()

    def next(self, count: int) -> tuple[mx.array, mx.array, mx.array]:
        """Which it then has said."""
        offset = self.cache.offset
        at = slice(offset, offset + count)
        new = self.text.keys[:, :, at], self.text.values[:, :, at]
        self.said = tuple(
            mx.concatenate([old[:, :, :offset], more], axis=2)
            for old, more in zip(self.said or new, new, strict=True)
        )
        return self.text.queries[:, :, at], *new

    def seen(self, queries: mx.array) -> mx.array:
        keys, values = self.said
        return scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask="causal")


@dataclass(kw_only=True)
class Kept:
    """An array that is looked at when all is over, and what must be in it then."""

    array: mx.array
    wanted: mx.array

    def is_true(self) -> bool:
        return np.array_equal(np.array(self.array), np.array(self.wanted))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_what_was_read_of_a_cache_stays_true_whatever_is_written_next(
    texts: list[Text], seed: int
) -> None:
    """Copies, pieces, and mere views of a buffer, evaluated at once, later, or at the very end."""
    dice, kept = random.Random(seed), list[Kept]()
    rows = [Row(text=dice.choice(texts)) for _ in range(3)]
    for row in rows:
        kept += written(row, dice.choice([1, 40, 300]))
    for _ in range(40):
        row = dice.choice(rows)
        cache = row.cache
        match dice.choice("aaaaabbbccctttvfp"):
            case "a":
                kept += written(row, dice.choice([1, 1, 1, 5, 60]))
            case "b":
                kept += side_by_side(rows)
            case "c" | "f":  # the copy goes on elsewhere, in the place of another row
                twin = cache.copy()
                if dice.random() < 0.5:
                    mx.async_eval(twin.state())
                other = Row(text=dice.choice(texts), cache=twin, said=row.said)
                kept += held(other)
                rows[dice.randrange(3)] = other
            case "t":
                kept += held(row)
                cache.trim(dice.randrange(min(50, cache.offset)))
                row.text = dice.choice(texts)
            case "v":
                kept += held(row)
            case _:
                cut = dice.randrange(cache.offset)
                kept += held(Row(text=row.text, cache=cache.slice(0, cut), said=row.said))
        if dice.random() < 0.7:
            mx.async_eval([row.cache.state() for row in rows])
        if dice.random() < 0.3 and kept:
            mx.async_eval(dice.choice(kept).array)
        if dice.random() < 0.1 and kept:  # forgotten, perhaps while it is worked on
            kept.pop(dice.randrange(len(kept)))
    for row in rows:
        kept += held(row)
    assert all(one.is_true() for one in kept)


def written(row: Row, count: int) -> list[Kept]:
    if row.cache.offset + count > TEXT:
        return []
    queries, keys, values = row.next(count)
    out = row.cache.attend(queries, keys, values, scale=SCALE)
    return [Kept(array=out, wanted=row.seen(queries))]


def side_by_side(rows: list[Row]) -> list[Kept]:
    offsets = [row.cache.offset for row in rows]
    if max(offsets) >= TEXT:
        return []
    each = [row.next(1) for row in rows]
    parts = [mx.concatenate(list(part)) for part in zip(*each, strict=True)]
    together = BatchKVCache([row.cache for row in rows], mx.array(offsets))
    out = together.attend(*parts, scale=SCALE)
    seen = [row.seen(queries) for row, (queries, _, _) in zip(rows, each, strict=True)]
    return [Kept(array=out, wanted=mx.concatenate(seen))]


def held(row: Row) -> list[Kept]:
    """Views of what its cache has now."""
    end = row.cache.offset
    return [
        Kept(array=array[..., :end, :], wanted=said[..., :end, :])
        for array, said in zip(row.cache.state(), row.said, strict=False)
    ]


def test_a_step_is_written_where_the_last_one_was(texts: list[Text]) -> None:
    """Else each would copy the whole cache: that is what this is for. Also while the last one is
    still worked on; but where MLX is long in letting go of it, it is copied."""
    row = Row(text=texts[0])
    row.cache.reserve(TEXT)
    written(row, 200)
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


def test_a_buffer_that_numpy_looks_at_is_copied(texts: list[Text]) -> None:
    row = Row(text=texts[0])
    written(row, 10)
    mx.eval(row.cache.state())
    looked_at = np.array(row.cache.state()[0], copy=False)
    before = looked_at.copy()
    row.cache.trim(5)
    other = Row(text=texts[1], cache=row.cache)
    mx.eval(written(other, 3)[0].array, row.cache.state())
    assert np.array_equal(looked_at, before)


@pytest.mark.parametrize("count", [1, 7])
def test_rows_that_are_forgotten_while_they_are_worked_on_leave_no_trace(
    texts: list[Text], count: int
) -> None:
    """Their memory goes to whoever asks next, and must not be written to any more."""
    for _ in range(30):
        row = Row(text=texts[0])
        written(row, 400)
        mx.async_eval(row.cache.state())
        written(row, count)
        mx.async_eval(row.cache.state())
        del row
        size = (1, HEADS, 512, DIM)
        others = [mx.full(size, float(i)) for i in range(6)]
        mx.async_eval(others)
        assert all(mx.all(other == i).item() for i, other in enumerate(others))


class TestWhatItLeavesAlone:
    """None, and nothing has changed."""

    def parts(self, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
        return [mx.ones((1, heads, 2, DIM), dtype) for heads in (HEADS * GROUP, HEADS, HEADS)]

    def asked(self, cache: Any, parts: list[mx.array]) -> mx.array | None:
        return attend_in_place([cache], *parts, scale=SCALE, sinks=None, softcap=None)

    def test_other_types(self) -> None:
        cache = KVCache()
        assert self.asked(cache, self.parts(mx.bfloat16)) is None
        assert (cache.offset, cache.state()) == (0, [])

    def test_several_sequences_in_one_cache(self) -> None:
        cache = KVCache()
        parts = [mx.concatenate([part, part]) for part in self.parts()]
        assert self.asked(cache, parts) is None
        assert (cache.offset, cache.state()) == (0, [])

    def test_caches_that_do_not_lend(self) -> None:
        class Own(KVCache):
            supports_in_place = False

        assert self.asked(Own(), self.parts()) is None

    def test_other_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        assert self.asked(KVCache(), self.parts()) is None

    def test_and_takes_all_others(self) -> None:
        assert self.asked(KVCache(), self.parts()) is not None
        assert self.asked(RotatingKVCache(3), self.parts()) is not None
