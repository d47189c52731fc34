"""The length of a common prefix, against a simple loop."""

from hypothesis import given
from hypothesis import strategies as st

from app.engine.prefix.cache import common_prefix_length, usable_length

Ids = st.lists(st.integers(0, 1), max_size=20).map(tuple)


@given(shared=Ids, a=Ids, b=Ids, at=st.integers(0, 5))
def test_the_common_prefix_equals_that_of_a_loop(
    shared: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], at: int
) -> None:
    one, other = shared + a, (9,) * at + shared + b
    expected = 0
    while expected < min(len(one), len(other) - at) and one[expected] == other[at + expected]:
        expected += 1
    assert common_prefix_length(one, other, at) == expected


@given(
    length=st.integers(0, 60),
    alignment=st.integers(1, 8),
    ranges=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 12)), max_size=4),
)
def test_a_usable_length_is_aligned_and_in_no_atomic_range(
    length: int, alignment: int, ranges: list[tuple[int, int]]
) -> None:
    atomic = [(start, start + size) for start, size in ranges]
    allowed = [
        at
        for at in range(0, length + 1, alignment)
        if not any(start < at < end for start, end in atomic)
    ]
    assert usable_length(length, alignment, atomic) == max(allowed)
