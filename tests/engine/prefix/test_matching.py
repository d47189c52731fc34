"""The length of a common prefix, against a simple loop."""

from hypothesis import given
from hypothesis import strategies as st

from app.engine.prefix.matching import common_prefix_length

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
