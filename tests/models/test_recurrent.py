"""The cache of recurrent layers: states of one sequence, of several side by side, and copies."""

import mlx.core as mx
import numpy as np
import pytest

from models.recurrent import RecurrentCache

SHAPE = (1, 4, 64, 64)


def holding(*values: float) -> RecurrentCache:
    """A state in slot 0 whose elements are the sum of the values, one position each."""
    cache = RecurrentCache(2)
    for value in values:
        held = cache[0]
        cache[0] = mx.full(SHAPE, value) if held is None else held + value
        cache.advance(1)
    return cache


def step(rows: list[RecurrentCache], value: float) -> None:
    """What a layer does for one position of each row."""
    together = rows[0].make_batch(rows, mx.array([row.offset for row in rows]))
    held = together[0]
    assert held is not None
    assert held.shape == (len(rows), *SHAPE[1:])
    together[0] = held + value
    together.advance(1)


def content(cache: RecurrentCache) -> tuple[int, float]:
    held = cache[0]
    assert held is not None
    assert held.shape == SHAPE
    values = set(np.array(held).flat)
    assert len(values) == 1
    return cache.offset, float(values.pop())


def test_a_copy_and_its_original_go_their_own_ways() -> None:
    cache = holding(1, 2)
    twin = cache.copy()
    cache[0] = mx.full(SHAPE, 9.0)
    cache.advance(1)
    assert (content(twin), content(cache)) == ((2, 3.0), (3, 9.0))
    assert twin[1] is None


def test_a_state_cannot_be_cut_back_nor_into_pieces() -> None:
    cache = holding(1, 2)
    assert not cache.sliceable
    assert cache.can_trim(0)
    cache.trim(0)
    assert not cache.can_trim(1)
    with pytest.raises(AssertionError):
        cache.trim(1)
    with pytest.raises(AssertionError, match="whole"):
        cache.slice(0, 1)
    with pytest.raises(AssertionError, match="whole"):
        cache.append(holding(1), 0, 1)


def test_bytes_are_those_of_the_states_however_long_the_sequence() -> None:
    cache = holding(1)
    assert cache.nbytes == cache.estimate_nbytes(10_000, 512) == 4 * 4 * 64 * 64
    assert [state.shape for state in cache.state()] == [SHAPE]
    assert RecurrentCache(2).nbytes == 0


def test_rows_of_a_batch_join_leave_and_are_copied_between_any_two_steps() -> None:
    first, second, third = holding(1), holding(10, 10), holding(100)
    step([first, second], 1)
    kept = second.copy()
    step([first, second, third], 2)
    step([third, first], 4)
    assert content(first) == (4, 1 + 1 + 2 + 4)
    assert content(second) == (4, 20 + 1 + 2)
    assert content(third) == (3, 100 + 2 + 4)
    assert content(kept) == (3, 20 + 1)


def test_rows_that_know_nothing_yet_have_no_states() -> None:
    fresh = [RecurrentCache(1), RecurrentCache(1)]
    assert fresh[0].make_batch(fresh, mx.array([0, 0]))[0] is None
    mixed = [holding(1), RecurrentCache(2)]
    with pytest.raises(AssertionError, match="prefilled"):
        _ = mixed[0].make_batch(mixed, mx.array([1, 0]))[0]


def test_a_copy_of_one_row_does_not_keep_the_batch_alive() -> None:
    """A row's state is a view of all rows' states. One of eight that was kept held the bytes of
    eight, seven of which no book knew of."""
    rows = [holding(1) for _ in range(8)]
    step(rows, 1)
    mx.eval([row.state() for row in rows])
    before = mx.get_active_memory()
    kept = rows[3].copy()
    mx.eval(kept.state())
    size = kept.nbytes
    rows.clear()
    assert mx.get_active_memory() <= before - 7 * size
    assert content(kept) == (2, 2.0)
