"""What several lives of an engine came to.

Knows: which of an engine's figures count and which say how things stand. A counter that fell back
to nothing whenever a runner is started again would be wrong in every sum over models.
"""

from dataclasses import replace

from app.core.jobs import EngineStats, MissReason

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


def all_told(past: EngineStats, now: EngineStats) -> EngineStats:
    """now, with what was counted before it."""
    if past.steps == 0:
        return now
    misses: dict[MissReason, int] = dict(past.misses)
    for reason, count in now.misses:
        misses[reason] = misses.get(reason, 0) + count
    return replace(
        now,
        **{name: getattr(past, name) + getattr(now, name) for name in _COUNTERS},
        hits=tuple(map(sum, zip(past.hits, now.hits, strict=True))),
        misses=tuple(misses.items()),
    )


def of_the_past(stats: EngineStats) -> EngineStats:
    """What is left of an engine's figures when it is gone."""
    return all_told(stats, EngineStats())
