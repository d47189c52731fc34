"""Counters continue when a model's engine is replaced."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from app.core.jobs import EngineStats
from app.runners.handle import accumulate_stats, counters_only

# every other number of an engine is a counter
GAUGES = {"allocated_bytes", "running", "waiting", "embedding_jobs"}
COUNTERS = [
    field.name
    for field in fields(EngineStats)
    if isinstance(field.default, int) and field.name not in GAUGES
]


def advance(stats: EngineStats, more: tuple[int, ...]) -> EngineStats:
    """The stats of an engine after at least one more step."""
    counts: dict[str, Any] = {
        name: getattr(stats, name) + count for name, count in zip(COUNTERS, more, strict=True)
    }
    counts["steps"] += 1
    hits = (stats.prefix_hit_counts[0] + more[0], *stats.prefix_hit_counts[1:])
    misses = (("empty", dict(stats.prefix_miss_counts).get("empty", 0) + more[1]),)
    return replace(
        stats, **counts, prefix_hit_counts=hits, prefix_miss_counts=misses, running=more[2]
    )


@given(
    st.lists(
        st.lists(st.tuples(*[st.integers(0, 5)] * len(COUNTERS)), max_size=5),
        min_size=1,
        max_size=6,
    )
)
def test_counters_never_decrease_and_lose_nothing(lives: list[list[tuple[int, ...]]]):
    """lives: of each engine of a model, the increments of its counters."""
    past = before = EngineStats()
    expected = dict.fromkeys(COUNTERS, 0)
    for life in lives:
        now = EngineStats()
        for more in (None, *life):
            now = now if more is None else advance(now, more)
            total = accumulate_stats(past, now)
            for name in COUNTERS:
                assert getattr(total, name) >= getattr(before, name)
            assert all(map(int.__le__, before.prefix_hit_counts, total.prefix_hit_counts))
            misses = dict(total.prefix_miss_counts)
            assert all(misses[reason] >= count for reason, count in before.prefix_miss_counts)
            assert {name: getattr(total, name) for name in GAUGES} == {
                name: getattr(now, name) for name in GAUGES
            }
            before = total
        for name in COUNTERS:
            expected[name] += getattr(now, name)
        past = counters_only(accumulate_stats(past, now))
        assert past.running == 0
    assert {name: getattr(past, name) for name in COUNTERS} == expected
    assert past.prefix_hit_counts[0] == expected[COUNTERS[0]]
