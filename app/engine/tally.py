"""What the engine has done, counted where it is done.

Knows: counts. Must not know: tensors, policies. The loop is the only writer.
"""

from bisect import bisect_left
from collections import Counter

from app.core.jobs import PREFIX_HIT_BUCKETS, CacheMiss, CacheMissReason, EngineStats, Ledger


class EngineCounters:
    """Counters since the engine started. exceptions: times that something raised."""

    def __init__(self) -> None:
        self.cached_tokens = self.prefix_query_tokens = self.prefilled_tokens = (
            self.generated_tokens
        ) = 0
        self.preemptions = self.failures = self.exceptions = self.steps = 0
        self._hits = [0] * (len(PREFIX_HIT_BUCKETS) + 1)
        self._misses: Counter[CacheMissReason] = Counter()

    def record_lookup(self, length: int, cached: int, miss: CacheMiss | None) -> None:
        """A prompt of `length` tokens was looked up in the prefix cache."""
        self.prefix_query_tokens += length
        self.cached_tokens += cached
        self._hits[bisect_left(PREFIX_HIT_BUCKETS, cached)] += 1
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
            allocated_bytes=memory,
            running=running,
            waiting=waiting,
            cached_tokens=self.cached_tokens,
            prefix_query_tokens=self.prefix_query_tokens,
            prefilled_tokens=self.prefilled_tokens,
            generated_tokens=self.generated_tokens,
            embedding_jobs=embedding,
            embedded_tokens=embedded,
            ledger=ledger,
            prefix_hit_counts=tuple(self._hits),
            prefix_miss_counts=tuple(sorted(self._misses.items())),
            prefix_evictions=evictions,
            preemptions=self.preemptions,
            failures=self.failures,
            steps=self.steps,
        )
