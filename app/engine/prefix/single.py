"""A prefix cache with a single entry, for one chat at a time.

Knows: token IDs, layer caches as `LayerKV`. Must not know: tensors, models, requests.

The semantics are the same as in Ollama's mlxrunner (x/mlxrunner/cache.go of March 2026). The
longest common prefix is reused, except for the last token of the prompt, which is always computed.
If all layers can be trimmed, they are trimmed; otherwise, the sequence starts with fresh layers.
While the entry is stored, the offset of every layer is len(entry.ids).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from app.core.jobs import CacheMiss, PrefixNode, PrefixSnapshot
from app.engine.prefix.cache import (
    Layer,
    PrefixCacheConfig,
    can_trim_to,
    common_prefix_length,
    explain_miss,
    list_stored_lengths,
    trim_to,
    usable_length,
)
from models.kv import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry(Generic[Layer]):
    ids: tuple[int, ...]
    kv: Sequence[Layer]
    stored_at: float


class SinglePrefixCache(Generic[Layer]):
    """A prefix cache with one entry.

    make_kv: creates fresh layer caches.
    alignment: prefix lengths are multiples of this number of tokens (see `--exact`).
    """

    needs_checkpoints = shares_live = False

    def __init__(self, make_kv: Callable[[], Sequence[Layer]], *, alignment: int = 1) -> None:
        assert alignment > 0
        self._make_kv = make_kv
        self._alignment = alignment
        self._entry: _Entry[Layer] | None = None
        self.evictions = 0

    def begin(
        self,
        ids: Sequence[int],
        *,
        turn_ends: Sequence[int] = (),
        reuse: bool = True,
        reserve_length: int = 0,
        atomic: Sequence[tuple[int, int]] = (),
        stops: Sequence[int] = (),
    ) -> "SingleLease[Layer]":
        """Implements `PrefixCache.begin`. `turn_ends` and `stops` are ignored, because the only
        entry ends at the end of its sequence."""
        assert ids, "the prompt is empty"
        entry, self._entry = self._entry, None
        cached_ids = entry.ids if entry is not None and reuse else ()
        shared = common_prefix_length(cached_ids, tuple(ids))
        # The last token must be computed, because the output starts from its hidden state.
        usable = usable_length(min(shared, len(ids) - 1), self._alignment, atomic)
        kv, cached = None, 0
        if entry is not None and usable > 0 and can_trim_to(entry.kv, usable):
            trim_to(entry.kv, usable)
            kv, cached = entry.kv, usable
        # If the old layers are not reused, free them before new ones are created.
        del entry
        if kv is None:
            kv = self._make_kv()
        for layer in kv:
            layer.reserve(max(reserve_length, len(ids) + 1))
        miss = None
        if cached < self._align_down(len(ids) - 1):
            miss = (
                explain_miss(
                    shared=shared, usable=usable, cached=cached, cached_ids=cached_ids[shared:]
                )
                if reuse
                else CacheMiss(position=0, reason="unwanted")
            )
        return SingleLease(self, kv, cached=cached, miss=miss)

    def continued_bytes(
        self,
        ids: Sequence[int],
        *,
        reuse: bool = True,
        atomic: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Implements `PrefixCache.continued_bytes`. A lease always continues or frees the entry."""
        return self.nbytes

    @property
    def nbytes(self) -> int:
        return 0 if self._entry is None else sum(layer.nbytes for layer in self._entry.kv)

    @property
    def num_layers(self) -> int:
        return 0 if self._entry is None else len(self._entry.kv)

    def evict(self, num_bytes: int) -> int:
        """Evicts the whole entry, and returns the number of freed bytes."""
        freed = self.nbytes
        if num_bytes <= 0 or self._entry is None:
            return 0
        self._entry = None
        self.evictions += 1
        return freed

    def clear(self) -> None:
        self._entry = None

    def check(self) -> None:
        if self._entry is None:
            return
        length = len(self._entry.ids)
        assert length > 0
        assert self._align_down(length) == length
        assert all(layer.offset == length for layer in self._entry.kv)

    def snapshot(self, max_nodes: int) -> PrefixSnapshot:
        """Implements `PrefixCache.snapshot`. A leased entry is not in the cache."""
        entry = self._entry
        if entry is None or max_nodes < 1:
            return PrefixSnapshot()
        node = PrefixNode(parent=None, start=0, tokens=len(entry.ids), last_used=entry.stored_at)
        return PrefixSnapshot(nodes=(node,), total_nodes=1)

    def store_prefix(self, ids: Sequence[int], kv: Sequence[Layer], *, keep: int) -> None:
        """Replaces the entry. Called when a lease ends."""
        for length in list_stored_lengths(kv, len(ids), keep, self._alignment):
            if can_trim_to(kv, length):
                trim_to(kv, length)
                self._entry = _Entry(ids=tuple(ids[:length]), kv=kv, stored_at=time.time())
                return

    def _align_down(self, length: int) -> int:
        return length - length % self._alignment


class SingleLease(Generic[Layer]):
    """The layer caches leased to one sequence. A lease ends exactly once."""

    def __init__(
        self,
        cache: SinglePrefixCache[Layer],
        kv: Sequence[Layer],
        *,
        cached: int,
        miss: CacheMiss | None,
    ) -> None:
        self._cache: SinglePrefixCache[Layer] | None = cache
        self.kv: Sequence[Layer] = kv
        self.cached = cached
        self.miss = miss
        self.checkpoint_positions: Sequence[int] = ()

    def publish(self, ids: Sequence[int]) -> None:
        """Does nothing, because the entry is not shared before the lease ends."""

    def commit(self, ids: Sequence[int], *, keep: int) -> None:
        assert self._cache is not None, "the lease has ended"
        try:
            self._cache.store_prefix(ids, self.kv, keep=keep)
        finally:
            self.discard()

    def discard(self) -> None:
        self._cache = None
        self.kv = ()


def create_cache(config: PrefixCacheConfig) -> SinglePrefixCache[LayerCache]:
    return SinglePrefixCache(config.make_kv, alignment=config.alignment)
