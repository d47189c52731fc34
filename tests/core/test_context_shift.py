"""The number of discarded tokens when a context is full: a table of values, and properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.context_shift import count_discarded, resolve_num_keep, truncate_prompt
from tests.rows import rows


@rows(
    ("context", "length", "num_keep", "discard"),
    [
        (2048, 2048, 0, 1024),  # full: half of it
        (2048, 2048, 4, 1022),  # half of the rest
        (2048, 2048, 5, 1021),  # rounded down
        (2048, 2000, 5, 973),  # 48 are free already
        (2048, 1027, 5, 0),  # exactly the required number is free
        (2048, 1028, 5, 1),
        (2048, 0, 0, 0),
        (2048, 2048, 2047, 1),  # half of one rounds up to one
        (2048, 2047, 2047, 0),
        (2048, 2048, 2046, 1),
        (2048, 2048, 2045, 1),
        (2048, 2048, 2044, 2),
        (1, 1, 0, 1),
        (2, 2, 1, 1),
        (2, 1, 0, 0),
    ],
)
def test_the_older_half_is_discarded(
    context: int, length: int, num_keep: int, discard: int
) -> None:
    assert count_discarded(context=context, length=length, num_keep=num_keep) == discard


@pytest.mark.parametrize(
    ("context", "length", "num_keep"), [(8, 8, 8), (8, 8, 9), (8, 8, -1), (8, 9, 0)]
)
def test_impossible_lengths_are_a_programming_error(
    context: int, length: int, num_keep: int
) -> None:
    with pytest.raises(AssertionError):
        count_discarded(context=context, length=length, num_keep=num_keep)


@given(st.data())
def test_a_full_context_always_shifts_and_keeps_num_keep_tokens(data: st.DataObject) -> None:
    context = data.draw(st.integers(1, 100))
    length = data.draw(st.integers(0, context))
    num_keep = data.draw(st.integers(0, context - 1))
    discard = count_discarded(context=context, length=length, num_keep=num_keep)
    assert 0 <= discard <= max(0, length - num_keep)
    assert discard > 0 or length < context
    free = context - length + discard
    assert free >= max((context - num_keep) // 2, 1)
    assert count_discarded(context=context, length=length - discard, num_keep=num_keep) == 0


@pytest.mark.parametrize(
    ("num_keep", "length", "context", "expected"),
    [(4, 100, 50, 4), (0, 100, 50, 0), (-1, 30, 50, 30), (-1, 100, 50, 49), (60, 100, 50, 49)],
)
def test_a_negative_keep_is_the_whole_prompt_and_one_position_can_always_shift(
    num_keep: int, length: int, context: int, expected: int
) -> None:
    assert resolve_num_keep(num_keep, length=length, context=context) == expected


@pytest.mark.parametrize(
    ("length", "context", "num_keep", "result"),
    [
        (4, 5, 0, [0, 1, 2, 3]),  # fits, with one free position
        (5, 5, 0, [1, 2, 3, 4]),  # fits, but nothing could be sampled
        (8, 5, 0, [4, 5, 6, 7]),
        (8, 5, 2, [0, 1, 6, 7]),
        (8, 5, 3, [0, 1, 2, 7]),
        (8, 5, 4, [0, 1, 2, 7]),  # the last id is kept with any num_keep
        (8, 5, 50, [0, 1, 2, 7]),
        (8, 5, -1, [0, 1, 2, 7]),
        (8, 2, 1, [7]),
    ],
)
def test_a_long_prompt_keeps_its_beginning_and_its_end(
    length: int, context: int, num_keep: int, result: list[int]
) -> None:
    assert list(truncate_prompt(range(length), context=context, num_keep=num_keep)) == result


@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    context=st.integers(2, 40),
    num_keep=st.integers(-1, 50),
)
def test_a_truncated_prompt_leaves_one_free_position(
    ids: list[int], context: int, num_keep: int
) -> None:
    result = truncate_prompt(ids, context=context, num_keep=num_keep)
    assert len(result) == min(len(ids), context - 1)
    assert result[-1] == ids[-1]
    if len(ids) < context:
        assert result == ids


def test_a_context_of_one_position_holds_no_prompt_and_answer() -> None:
    with pytest.raises(AssertionError):
        truncate_prompt([1, 2], context=1, num_keep=0)
