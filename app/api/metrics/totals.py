"""What a model's engines have counted, all of their lives together.

Knows: counters only ever grow, and begin at zero again with a new engine. Must not know: how they
are told to anybody. Pure.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from app.core.jobs import EngineStats
from app.core.residents import ModelState

# all others of `EngineStats` are gauges
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """past: of the engines that are gone. last: what the present one told last. pid: the process it
    was in, if it has one for itself.

    What an engine counted between the last time that somebody looked and its end is lost: there is
    nobody left to ask."""

    past: EngineStats = field(default_factory=EngineStats)
    last: EngineStats = field(default_factory=EngineStats)
    pid: int | None = None

    def then(self, state: ModelState) -> "Totals":
        """Once more has been told. Another process is another engine; so is one that has counted
        less than before."""
        now = state.stats
        another = None not in (self.pid, state.pid) and self.pid != state.pid
        past = _plus(self.past, self.last) if another or _less(now, self.last) else self.past
        return Totals(past=past, last=now, pid=self.pid if state.pid is None else state.pid)

    @property
    def stats(self) -> EngineStats:
        """The gauges of now, and the counters since the server started."""
        return _plus(self.last, self.past)


def _plus(stats: EngineStats, more: EngineStats) -> EngineStats:
    """Gauges are those of `stats`."""
    counts: Mapping[str, int] = {
        name: getattr(stats, name) + getattr(more, name) for name in _COUNTERS
    }
    misses = Counter(dict(stats.misses)) + Counter(dict(more.misses))
    return replace(
        stats,
        **counts,
        hits=tuple(map(sum, zip(stats.hits, more.hits, strict=True))),
        misses=tuple(sorted(misses.items())),
    )


def _less(now: EngineStats, before: EngineStats) -> bool:
    """Whether any counter has gone back."""
    misses = Counter(dict(now.misses))
    return (
        any(getattr(now, name) < getattr(before, name) for name in _COUNTERS)
        or any(count < had for count, had in zip(now.hits, before.hits, strict=True))
        or any(misses[reason] < had for reason, had in before.misses)
    )
