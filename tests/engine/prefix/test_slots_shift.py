"""A full context in a slot: the discarded ids, the kept ids, and their reuse."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.context_shift import ShiftResult
from tests.engine.prefix.layers import FakeLayer
from tests.engine.prefix.test_slots import begin_and_publish, cache_of, count_cached

# added to ids that a shift has moved, because their keys depend on the discarded ids
MOVED = 1000


def move(kv: Sequence[FakeLayer], start: int, end: int) -> bool:
    """As a model that can shift: later ids move up, and are marked."""
    for layer in kv:
        layer.remove(start, end)
        layer.ids = (*layer.ids[:start], *(id % MOVED + MOVED for id in layer.ids[start:]))
    return True


def refuse(kv: Sequence[FakeLayer], start: int, end: int) -> bool:
    return False


FULL = [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_shift_discards_the_older_half_after_the_kept_ids() -> None:
    cache = cache_of("kk", context=8)
    lease = begin_and_publish(cache, FULL)
    assert lease.shift(FULL, num_keep=2, remove=move) == ShiftResult(
        ids=(0, 1, 5, 6, 7), num_computed=5
    )
    assert [layer.ids for layer in lease.kv] == [(0, 1, 1005, 1006, 1007)] * 2
    cache.check()


def test_a_context_that_is_not_full_is_not_shifted() -> None:
    def never(kv: Sequence[FakeLayer], start: int, end: int) -> bool:
        raise AssertionError("the context is not full")

    lease = begin_and_publish(cache_of(context=16), FULL)
    assert lease.shift(FULL, num_keep=0, remove=never) == ShiftResult(
        ids=tuple(FULL), num_computed=8
    )


@pytest.mark.parametrize("kinds", ["k", "kr", "kw"])
def test_layers_that_cannot_shift_restart_with_the_remaining_ids(kinds: str) -> None:
    cache = cache_of(kinds, context=8)
    lease = begin_and_publish(cache, FULL)
    before = lease.kv
    shifted = lease.shift(FULL, num_keep=2, remove=refuse)
    assert shifted == ShiftResult(ids=(0, 1, 5, 6, 7), num_computed=0)
    assert [layer.ids for layer in lease.kv] == [()] * len(kinds)
    assert lease.kv is not before
    assert lease.kv[0].reserved >= 5
    cache.check()
    for layer in lease.kv:
        layer.feed(shifted.ids)
    lease.commit(shifted.ids, keep=5)
    assert count_cached(cache, [0, 1, 5, 6, 7, 8]) == 5, "the ids were evaluated again"


def test_a_restart_makes_shifted_ids_reusable() -> None:
    cache = cache_of(context=8)
    lease = begin_and_publish(cache, FULL)
    ids = (*lease.shift(FULL, num_keep=2, remove=move).ids, 8, 9, 10)
    lease.kv[0].feed([8, 9, 10])
    ids = lease.shift(ids, num_keep=1, remove=refuse).ids
    lease.kv[0].feed(ids)
    lease.commit(ids, keep=8)
    assert count_cached(cache, [*ids, 99]) == len(ids)


def test_a_restarted_slot_lends_nothing_before_it_publishes() -> None:
    cache = cache_of(context=8)
    lease = begin_and_publish(cache, FULL)
    lease.shift(FULL, num_keep=2, remove=refuse)
    assert count_cached(cache, FULL) == 0


def test_a_full_context_with_one_discardable_id_discards_it() -> None:
    lease = begin_and_publish(cache_of(context=8), FULL)
    assert lease.shift(FULL, num_keep=7, remove=move).ids == (0, 1, 2, 3, 4, 5, 6)
    with pytest.raises(AssertionError):
        begin_and_publish(cache_of(context=8), FULL).shift(FULL, num_keep=8, remove=move)


@given(num_keeps=st.lists(st.integers(0, 7), min_size=1, max_size=4), reuse=st.integers(0, 16))
def test_shifted_ids_serve_only_their_own_sequence(num_keeps: list[int], reuse: int) -> None:
    """Shifted ids were evaluated after the discarded ones: their layers are not those of a shorter
    prompt. They are marked, so that the test detects their reuse."""
    cache = cache_of("kk", context=8)
    ids = list(FULL)
    lease = begin_and_publish(cache, ids)
    for number, keep in enumerate(num_keeps, 1):
        ids = list(lease.shift(ids, num_keep=keep, remove=move).ids)
        more = list(range(20, 20 + 8 - len(ids)))
        for layer in lease.kv:
            layer.feed(more)
        ids += more
        lease.publish(ids)
        cache.check()
        assert count_cached(cache, [*ids, 99]) == min(num_keeps[:number])
    lease.commit(ids, keep=reuse)
    cache.check()
    assert count_cached(cache, [*ids, 99]) == min(*num_keeps, reuse)
