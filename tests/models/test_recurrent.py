"""The cache of recurrent layers: states of one sequence and of batches, and copies."""

import mlx.core as mx
import numpy as np
import pytest

from models.recurrent import RecurrentCache

SHAPE = (1, 4, 64, 64)


def make_cache(*values: float) -> RecurrentCache:
    """A cache with one position per value; the elements of its state are the sum of the values."""
    cache = RecurrentCache(2)
    for value in values:
        state = cache[0]
        cache[0] = mx.full(SHAPE, value) if state is None else state + value
        cache.advance(1)
    return cache


def step(rows: list[RecurrentCache], value: float) -> None:
    """Update the states for one position of each row, as a layer does."""
    together = rows[0].make_batch(rows, mx.array([row.offset for row in rows]))
    state = together[0]
    assert state is not None
    assert state.shape == (len(rows), *SHAPE[1:])
    together[0] = state + value
    together.advance(1)


def content(cache: RecurrentCache) -> tuple[int, float]:
    state = cache[0]
    assert state is not None
    assert state.shape == SHAPE
    values = set(np.array(state).flat)
    assert len(values) == 1
    return cache.offset, float(values.pop())


def test_a_copy_and_its_original_are_independent() -> None:
    cache = make_cache(1, 2)
    twin = cache.copy()
    cache[0] = mx.full(SHAPE, 9.0)
    cache.advance(1)
    assert (content(twin), content(cache)) == ((2, 3.0), (3, 9.0))
    assert twin[1] is None


def test_a_state_can_be_neither_trimmed_nor_sliced() -> None:
    cache = make_cache(1, 2)
    assert not cache.sliceable
    assert cache.can_trim(0)
    cache.trim(0)
    assert not cache.can_trim(1)
    with pytest.raises(AssertionError):
        cache.trim(1)
    with pytest.raises(AssertionError, match="a recurrent state cannot be"):
        cache.slice(0, 1)
    with pytest.raises(AssertionError, match="a recurrent state cannot be"):
        cache.append(make_cache(1), 0, 1)


def test_the_size_does_not_depend_on_the_length() -> None:
    cache = make_cache(1)
    assert cache.nbytes == cache.estimate_nbytes(10_000, 512) == 4 * 4 * 64 * 64
    assert [state.shape for state in cache.state()] == [SHAPE]
    assert RecurrentCache(2).nbytes == 0


def test_rows_can_join_leave_and_be_copied_between_steps() -> None:
    first, second, third = make_cache(1), make_cache(10, 10), make_cache(100)
    step([first, second], 1)
    copy = second.copy()
    step([first, second, third], 2)
    step([third, first], 4)
    assert content(first) == (4, 1 + 1 + 2 + 4)
    assert content(second) == (4, 20 + 1 + 2)
    assert content(third) == (3, 100 + 2 + 4)
    assert content(copy) == (3, 20 + 1)


def test_new_rows_have_no_states() -> None:
    fresh = [RecurrentCache(1), RecurrentCache(1)]
    assert fresh[0].make_batch(fresh, mx.array([0, 0]))[0] is None
    mixed = [make_cache(1), RecurrentCache(2)]
    with pytest.raises(AssertionError, match="prefilled"):
        _ = mixed[0].make_batch(mixed, mx.array([1, 0]))[0]


def test_a_copy_of_one_row_does_not_retain_the_batch() -> None:
    """The state of a row is a view of the states of all rows. A copy of one of eight rows retained
    the bytes of eight, and the memory budget counted only one."""
    rows = [make_cache(1) for _ in range(8)]
    step(rows, 1)
    mx.eval([row.state() for row in rows])
    before = mx.get_active_memory()
    copy = rows[3].copy()
    mx.eval(copy.state())
    size = copy.nbytes
    rows.clear()
    assert mx.get_active_memory() <= before - 7 * size
    assert content(copy) == (2, 2.0)
