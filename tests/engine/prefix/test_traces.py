"""The radix policy on recorded conversations of agents (see benchmarks/replay.py). To encode them
takes ten seconds."""

from functools import cache
from pathlib import Path

import pytest

from benchmarks import traces
from benchmarks.replay import POLICIES, replay
from benchmarks.traces import RecordedTurn

pytestmark = pytest.mark.no_cover  # see tests/conftest.py


@cache
def turns(shared: Path) -> list[RecordedTurn]:
    return traces.interleave(traces.load_conversations(shared))


@pytest.mark.exhaustive
def test_with_unlimited_memory_hardly_anything_is_evaluated_twice(shared: Path) -> None:
    assert replay(POLICIES["radix"]("k"), turns(shared)).share >= 0.97


@pytest.mark.exhaustive
def test_a_quarter_of_the_memory_costs_little(shared: Path) -> None:
    everything = replay(POLICIES["radix"]("k"), turns(shared)).peak_nbytes
    assert replay(POLICIES["radix"]("k"), turns(shared), budget=everything // 4).share >= 0.85
