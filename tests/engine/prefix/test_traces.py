"""The radix policy on recorded conversations of agents (tests/bench/replay.py tells how)."""

from pathlib import Path

import pytest

from tests.bench import traces
from tests.bench.replay import POLICIES, replay
from tests.bench.traces import Turn

pytestmark = pytest.mark.no_cover  # see tests/conftest.py


@pytest.fixture(scope="module")
def turns(shared: Path) -> list[Turn]:
    return traces.interleaved(traces.conversations(shared))


def test_with_room_for_everything_hardly_anything_is_evaluated_twice(turns: list[Turn]) -> None:
    assert replay(POLICIES["radix"]("k"), turns).share >= 0.97


def test_a_quarter_of_that_room_costs_little(turns: list[Turn]) -> None:
    everything = replay(POLICIES["radix"]("k"), turns).held
    assert replay(POLICIES["radix"]("k"), turns, budget=everything // 4).share >= 0.85
