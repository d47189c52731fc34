"""The choice of the layout of layer caches, by numbers."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from app.engine.kv_layout import (
    SlabPolicy,
    choose_slab_rows,
    count_slots,
    measure_padding,
)

LIMITS = SlabPolicy()
Lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=9)


def choose(lengths: Sequence[int], slots: Sequence[int | None] = ()) -> set[int]:
    choice = choose_slab_rows(lengths, slots or [None] * len(lengths), LIMITS)
    assert choice.rebuild == (not slots), "the other rows keep their slots"
    return set(choice.rows)


def rebuild(lengths: Sequence[int], slots: Sequence[int | None]) -> set[int]:
    choice = choose_slab_rows(lengths, slots, LIMITS)
    assert choice.rebuild
    return set(choice.rows)


def test_similar_lengths_share_a_slab() -> None:
    assert choose([500, 510, 520]) == {0, 1, 2}
    assert choose([500, 510]) == set(), "two rows are too few"


def test_one_long_row_does_not_pad_the_others() -> None:
    """32,000 positions beside seven rows of 500: padded, the batch would be seven times as long."""
    lengths = [500, 510, 32_000, 520, 530, 540, 550, 560]
    assert measure_padding(lengths, 0) > 7
    assert choose(lengths) == {0, 1, 3, 4, 5, 6, 7}


def test_skewed_lengths_keep_separate_rows() -> None:
    assert choose([10, 100, 1000, 10_000]) == set()


def test_of_two_equal_groups_the_longer_rows_share_a_slab() -> None:
    assert choose([9, 900, 9, 900, 9, 900]) == {1, 3, 5}


def test_a_row_joins_only_if_the_padding_remains_small() -> None:
    assert choose([1000, 1000, 1000, 10], [0, 1, 2, None]) == {0, 1, 2}
    assert choose([1000, 1000, 1000, 900], [0, 1, 2, None]) == {0, 1, 2, 3}
    assert choose([1000, 1000, 1000, 4000], [0, 1, 2, None]) == {0, 1, 2}, "much longer"


def test_a_row_joins_in_a_hole_even_if_the_padding_is_large() -> None:
    """Rows have left. The padding is above the limit for joining, and the join reduces it."""
    assert choose([100, 100, 100], [0, 3, None]) == {0, 1, 2}


def test_rows_stay_until_the_padding_is_much_larger() -> None:
    assert choose([1000, 1000, 500], [0, 1, 2]) == {0, 1, 2}
    # the rows of the slots between these have left
    assert rebuild([100, 100, 100], [0, 1, 7]) == {0, 1, 2}
    assert rebuild([100, 100], [0, 7]) == set(), "too few for a new slab"
    assert rebuild([100], [0]) == set(), "a single row needs no slab"


@given(lengths=Lengths, data=st.data())
def test_the_padding_is_bounded(lengths: list[int], data: st.DataObject) -> None:
    places = data.draw(st.permutations(range(12)))
    slots = [place if data.draw(st.booleans()) else None for place in places[: len(lengths)]]
    before = {row for row, slot in enumerate(slots) if slot is not None}
    choice = choose_slab_rows(lengths, slots, LIMITS)
    if choice.rebuild:
        span, limit = 0, LIMITS.join_padding
    else:
        assert before <= choice.rows, "a row leaves only with all others"
        span = 1 + max(slot for slot in slots if slot is not None)
        limit = LIMITS.stay_padding
    if choice.rows:
        assert measure_padding([lengths[row] for row in choice.rows], span) <= limit


@given(lengths=Lengths)
def test_no_larger_group_of_similar_lengths_exists(lengths: list[int]) -> None:
    chosen = choose(lengths)
    ordered = sorted(lengths)
    best = max(
        (
            end - start
            for start, end in itertools.combinations(range(len(lengths) + 1), 2)
            if measure_padding(ordered[start:end], 0) <= LIMITS.join_padding
        ),
        default=0,
    )
    assert len(chosen) == (best if best >= LIMITS.min_rows else 0)


def test_slots_are_powers_of_two() -> None:
    assert [count_slots(rows, 32) for rows in (1, 8, 9, 16, 17, 32)] == [8, 8, 16, 16, 32, 32]
    assert count_slots(5, 6) == 6, "no more slots than sequences may run"
    assert count_slots(7, 6) == 7
