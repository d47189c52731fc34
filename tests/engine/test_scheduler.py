"""The scheduling policy: pure, so every case is a line."""

from hypothesis import given
from hypothesis import strategies as st

from app.engine.scheduler import Limits, admissions, prefill_shares

Counts = st.integers(0, 50)


@given(waiting=Counts, running=Counts, room=st.integers(1, 50))
def test_admission_fills_the_room_and_no_more(waiting: int, running: int, room: int) -> None:
    count = admissions(waiting=waiting, running=running, limits=Limits(running=room))
    assert 0 <= count <= waiting
    assert count == 0 or running + count <= room
    assert count == waiting or running + count >= room


@given(remaining=st.lists(st.integers(1, 100), max_size=8), budget=st.integers(1, 120))
def test_the_oldest_prompt_is_served_first_within_the_budget(
    remaining: list[int], budget: int
) -> None:
    shares = prefill_shares(remaining, Limits(prefill=budget))
    assert len(shares) == len(remaining)
    assert sum(shares) == min(budget, sum(remaining))
    for i, share in enumerate(shares):
        assert 0 <= share <= remaining[i]
        assert share == remaining[i] or not any(shares[i + 1 :])
