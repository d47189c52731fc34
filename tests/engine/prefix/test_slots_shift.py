"""A full context in a slot: what goes, what stays, and whom the rest may serve."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.context_shift import ShiftResult
from tests.engine.prefix.layers import FakeLayer
from tests.engine.prefix.test_slots import busy, cache_of, served

# added to ids that a shift has moved: what was evaluated in sight of others is not the same
MOVED = 1000


def move(kv: Sequence[FakeLayer], start: int, end: int) -> bool:
    """As a model that can shift: what stood behind moves up, and is marked."""
    for layer in kv:
        layer.remove(start, end)
        layer.ids = (*layer.ids[:start], *(id % MOVED + MOVED for id in layer.ids[start:]))
    return True


def cannot(kv: Sequence[FakeLayer], start: int, end: int) -> bool:
    return False


FULL = [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_shift_discards_the_older_half_behind_what_is_kept() -> None:
    cache = cache_of("kk", context=8)
    lease = busy(cache, FULL)
    assert lease.shift(FULL, num_keep=2, remove=move) == ShiftResult(
        ids=(0, 1, 5, 6, 7), num_computed=5
    )
    assert [layer.ids for layer in lease.kv] == [(0, 1, 1005, 1006, 1007)] * 2
    cache.check()


def test_a_context_with_room_enough_is_left_alone() -> None:
    def never(kv: Sequence[FakeLayer], start: int, end: int) -> bool:
        raise AssertionError("there was no need")

    lease = busy(cache_of(context=16), FULL)
    assert lease.shift(FULL, num_keep=0, remove=never) == ShiftResult(
        ids=tuple(FULL), num_computed=8
    )


@pytest.mark.parametrize("kinds", ["k", "kr", "kw"])
def test_layers_that_cannot_shift_begin_again_with_the_ids_that_are_left(kinds: str) -> None:
    cache = cache_of(kinds, context=8)
    lease = busy(cache, FULL)
    before = lease.kv
    shifted = lease.shift(FULL, num_keep=2, remove=cannot)
    assert shifted == ShiftResult(ids=(0, 1, 5, 6, 7), num_computed=0)
    assert [layer.ids for layer in lease.kv] == [()] * len(kinds)
    assert lease.kv is not before
    assert lease.kv[0].room >= 5
    cache.check()
    for layer in lease.kv:
        layer.feed(shifted.ids)
    lease.commit(shifted.ids, keep=5)
    assert served(cache, [0, 1, 5, 6, 7, 8]) == 5, "evaluated anew, so it is as good as any"


def test_beginning_again_makes_good_what_was_moved_before() -> None:
    cache = cache_of(context=8)
    lease = busy(cache, FULL)
    ids = (*lease.shift(FULL, num_keep=2, remove=move).ids, 8, 9, 10)
    lease.kv[0].feed([8, 9, 10])
    ids = lease.shift(ids, num_keep=1, remove=cannot).ids
    lease.kv[0].feed(ids)
    lease.commit(ids, keep=8)
    assert served(cache, [*ids, 99]) == len(ids)


def test_a_slot_that_began_again_lends_nothing_before_it_says_so() -> None:
    cache = cache_of(context=8)
    lease = busy(cache, FULL)
    lease.shift(FULL, num_keep=2, remove=cannot)
    assert served(cache, FULL) == 0


def test_a_full_context_of_kept_ids_but_one_discards_that_one() -> None:
    lease = busy(cache_of(context=8), FULL)
    assert lease.shift(FULL, num_keep=7, remove=move).ids == (0, 1, 2, 3, 4, 5, 6)
    with pytest.raises(AssertionError):
        busy(cache_of(context=8), FULL).shift(FULL, num_keep=8, remove=move)


@given(keeps=st.lists(st.integers(0, 7), min_size=1, max_size=4), reuse=st.integers(0, 16))
def test_what_a_shift_moved_serves_the_sequence_but_nobody_else(
    keeps: list[int], reuse: int
) -> None:
    """What was moved up has seen what was discarded: its layers are not those of a shorter
    prompt. Marked as such here, so that serving it would show."""
    cache = cache_of("kk", context=8)
    ids = list(FULL)
    lease = busy(cache, ids)
    for number, keep in enumerate(keeps, 1):
        ids = list(lease.shift(ids, num_keep=keep, remove=move).ids)
        more = list(range(20, 20 + 8 - len(ids)))
        for layer in lease.kv:
            layer.feed(more)
        ids += more
        lease.publish(ids)
        cache.check()
        assert served(cache, [*ids, 99]) == min(keeps[:number])
    lease.commit(ids, keep=reuse)
    cache.check()
    assert served(cache, [*ids, 99]) == min(*keeps, reuse)
