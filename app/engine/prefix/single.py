"""A prefix cache with a single entry, for one chat at a time.

Knows: ids and layer caches as `LayerKV`. Must not know: tensors, models, requests.

The semantics are those of Ollama's mlxrunner (x/mlxrunner/cache.go of March 2026): reuse the
longest common prefix; always leave one id to evaluate; trim the layers if all of them can be
trimmed, else start with fresh layers. Invariant: while the entry is stored, every layer's offset is
len(entry.ids).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from app.core.jobs import CacheMiss
from app.core.ports import Layer
from app.engine.prefix.matching import can_trim_to, common_prefix_length, trim_to
from app.engine.prefix.policy import PrefixCacheConfig
from models.kv import LayerCache

# number of cached ids that a miss reports where the prompt diverges
_MISS_IDS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry(Generic[Layer]):
    ids: tuple[int, ...]
    kv: Sequence[Layer]


class SinglePrefixCache(Generic[Layer]):
    """make_kv: makes fresh layer caches. alignment: prefixes end at multiples of it only (see
    `--exact`)."""

    def __init__(self, make_kv: Callable[[], Sequence[Layer]], *, alignment: int = 1) -> None:
        assert alignment > 0
        self._make_kv = make_kv
        self._alignment = alignment
        self._entry: _Entry[Layer] | None = None
        self._evictions = 0

    def begin(
        self,
        ids: Sequence[int],
        *,
        turn_ends: Sequence[int] = (),
        reuse: bool = True,
        reserve_length: int = 0,
    ) -> "SingleLease[Layer]":
        """See `PrefixCache`. turn_ends is ignored: the only entry ends where its sequence ended."""
        assert ids, "an empty prompt has nothing to evaluate"
        entry, self._entry = self._entry, None
        had = entry.ids if entry is not None and reuse else ()
        shared = common_prefix_length(had, tuple(ids))
        # the last id must be evaluated: the output starts from its hidden state
        usable = self._align_down(min(shared, len(ids) - 1))
        kv, cached = None, 0
        if entry is not None and usable > 0 and can_trim_to(entry.kv, usable):
            trim_to(entry.kv, usable)
            kv, cached = entry.kv, usable
        # free the old layers, if they are not reused, before new ones are made
        del entry
        if kv is None:
            kv = self._make_kv()
        for layer in kv:
            layer.reserve(max(reserve_length, len(ids) + 1))
        miss = None
        if cached < self._align_down(len(ids) - 1):
            miss = (
                _explain_miss(had, shared, usable, cached)
                if reuse
                else CacheMiss(position=0, reason="unwanted")
            )
        return SingleLease(self, kv, cached=cached, miss=miss)

    @property
    def shares_live(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return 0 if self._entry is None else sum(layer.nbytes for layer in self._entry.kv)

    @property
    def evictions(self) -> int:
        return self._evictions

    def evict(self, num_bytes: int) -> int:
        """Evicts the whole entry."""
        freed = self.nbytes
        if num_bytes <= 0 or self._entry is None:
            return 0
        self._entry = None
        self._evictions += 1
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

    def store_prefix(self, ids: Sequence[int], kv: Sequence[Layer], *, keep: int) -> None:
        """Called by a lease that ends. Replaces the entry."""
        # layers may differ after a step that failed half-way: use what all of them have
        offset = min(min((layer.offset for layer in kv), default=0), len(ids))
        wanted = self._align_down(min(offset, keep))
        # if a layer cannot be trimmed to the wanted length, store all: longer, but also valid
        lengths = (wanted, offset) if self._alignment == 1 else (wanted,)
        for length in lengths:
            if length > 0 and can_trim_to(kv, length):
                trim_to(kv, length)
                self._entry = _Entry(ids=tuple(ids[:length]), kv=kv)
                return

    def _align_down(self, length: int) -> int:
        return length - length % self._alignment


class SingleLease(Generic[Layer]):
    """Layer caches leased to one sequence; ends once."""

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
        """Does nothing: the entry is not shared before the lease ends."""

    def commit(self, ids: Sequence[int], *, keep: int) -> None:
        assert self._cache is not None, "the lease has ended"
        self._cache.store_prefix(ids, self.kv, keep=keep)
        self.discard()

    def discard(self) -> None:
        self._cache = None
        self.kv = ()


def _explain_miss(had: Sequence[int], shared: int, usable: int, cached: int) -> CacheMiss:
    """had: ids of the entry. shared: leading ids that the entry and the prompt have in common.
    usable: how many of these may be reused."""
    if cached < usable:
        return CacheMiss(position=cached, reason="no_state")
    if shared == 0:
        return CacheMiss(position=0, reason="empty")
    return CacheMiss(
        position=shared, reason="diverged", cached_ids=tuple(had[shared : shared + _MISS_IDS_SHOWN])
    )


def create_cache(config: PrefixCacheConfig) -> SinglePrefixCache[LayerCache]:
    return SinglePrefixCache(config.make_kv, alignment=config.alignment)
