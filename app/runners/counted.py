"""What several lives of an engine came to.

Knows: which of an engine's figures count and which say how things stand. A counter that fell back
to nothing whenever a runner is started again would be wrong in every sum over models.
"""

from dataclasses import replace

from app.core.jobs import CacheMissReason, EngineStats

_COUNTERS = (
    "cached_tokens",
    "looked_up_tokens",
    "prefilled_tokens",
    "generated_tokens",
    "embedded_tokens",
    "evictions",
    "preemptions",
    "failures",
    "steps",
)


def accumulate_stats(previous: EngineStats, current: EngineStats) -> EngineStats:
    """now, with what was counted before it."""
    if previous.steps == 0:
        return current
    misses: dict[CacheMissReason, int] = dict(previous.prefix_miss_counts)
    for reason, count in current.prefix_miss_counts:
        misses[reason] = misses.get(reason, 0) + count
    return replace(
        current,
        **{name: getattr(previous, name) + getattr(current, name) for name in _COUNTERS},
        prefix_hit_counts=tuple(
            map(sum, zip(previous.prefix_hit_counts, current.prefix_hit_counts, strict=True))
        ),
        prefix_miss_counts=tuple(misses.items()),
    )


def counters_only(stats: EngineStats) -> EngineStats:
    """What is left of an engine's figures when it is gone."""
    return accumulate_stats(stats, EngineStats())
