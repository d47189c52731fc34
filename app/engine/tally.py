"""What the engine has done, counted where it is done.

Knows: counts. Must not know: tensors, policies. The loop is the only writer.
"""

from bisect import bisect_left
from collections import Counter

from app.core.jobs import HIT_BOUNDS, EngineStats, Ledger, Miss, MissReason


class Tally:
    """Counters since the engine started. faults: times that something raised."""

    def __init__(self) -> None:
        self.cached = self.looked_up = self.prefilled = self.generated = 0
        self.preemptions = self.failures = self.faults = self.steps = 0
        self._hits = [0] * (len(HIT_BOUNDS) + 1)
        self._misses: Counter[MissReason] = Counter()

    def lookup(self, length: int, cached: int, miss: Miss | None) -> None:
        """A prompt of `length` tokens was looked up in the prefix cache."""
        self.looked_up += length
        self.cached += cached
        self._hits[bisect_left(HIT_BOUNDS, cached)] += 1
        if miss is not None:
            self._misses[miss.reason] += 1

    def stats(
        self,
        *,
        memory: int,
        running: int,
        waiting: int,
        embedding: int,
        embedded: int,
        evictions: int,
        ledger: Ledger,
    ) -> EngineStats:
        return EngineStats(
            memory=memory,
            running=running,
            waiting=waiting,
            cached_tokens=self.cached,
            looked_up_tokens=self.looked_up,
            prefilled_tokens=self.prefilled,
            generated_tokens=self.generated,
            embedding=embedding,
            embedded_tokens=embedded,
            ledger=ledger,
            hits=tuple(self._hits),
            misses=tuple(sorted(self._misses.items())),
            evictions=evictions,
            preemptions=self.preemptions,
            failures=self.failures,
            steps=self.steps,
        )
