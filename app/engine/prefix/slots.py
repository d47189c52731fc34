"""A prefix cache with a fixed number of slots, one for each concurrent sequence, as in Ollama.

Knows: token IDs, layer caches as `LayerKV`. Must not know: tensors, models, requests.

The semantics are the same as in Ollama's llamarunner (InputCache in runner/llamarunner/cache.go of
February 2025). For a single user, the idle slot with the longest common prefix is used. For many
users, the longest common prefix is copied from a busy or idle slot to the least recently used idle
slot. There are two differences from Ollama: layers that cannot be trimmed are never treated as
trimmable, and shifted positions are reused only by the sequence that shifted them.

    idle slot    ids     [ .............................. ]
                 layers  [ .............................. ]
    busy slot    ids     [ passed to `publish` ..... ]             these may be copied
                 layers  [ ......................... | growing ]   the first part never changes
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from app.core.context_shift import ShiftResult, count_discarded
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


# Slots are compared by identity, because two empty slots are not the same slot.
@dataclass(slots=True, eq=False)
class _Slot(Generic[Layer]):
    """A slot of the cache.

    `last_used` is a unique counter value that is set at the start of each use. Empty slots have the
    value 0, so they are the oldest. With a clock instead of a counter, two slots could have the
    same time, and their order would depend on the speed of the machine. `used_at` is
    the Unix time of this use. Only snapshots show it.
    """

    ids: tuple[int, ...] = ()
    kv: Sequence[Layer] = ()
    in_use: bool = False
    last_used: int = 0
    used_at: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.kv)

    def clear(self) -> None:
        self.ids, self.kv, self.in_use, self.last_used = (), (), False, 0


class SlotPrefixCache(Generic[Layer]):
    """A prefix cache with slots.

    make_kv: creates fresh layer caches.
    slots: the number of concurrent sequences.
    context: the maximum number of positions in a sequence.
    multi_user: whether to choose slots for many users.
    evaluate: called with copied layers before they are written to.
    alignment: prefix lengths are multiples of this number of tokens (see `--exact`).
    """

    needs_checkpoints = False

    def __init__(
        self,
        make_kv: Callable[[], Sequence[Layer]],
        *,
        slots: int,
        context: int,
        multi_user: bool,
        evaluate: Callable[[Sequence[Layer]], object] = lambda kv: None,
        alignment: int = 1,
    ) -> None:
        assert min(slots, context, alignment) > 0
        self.context = context
        self._make_kv = make_kv
        self._slots = [_Slot[Layer]() for _ in range(slots)]
        self.shares_live = multi_user
        self._evaluate = evaluate
        self._alignment = alignment
        self._uses = 0
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
    ) -> "SlotLease[Layer]":
        """Implements `PrefixCache.begin`. `turn_ends` and `stops` are ignored, because a slot
        stores no intermediate states."""
        assert ids, "the prompt is empty"
        prompt = tuple(ids)
        shared = self._shared_lengths(prompt)
        slot, best = self._choose_slot(shared)
        cached_ids = best.ids  # read before trimming, as both slots may be the same
        # The last token must be computed, because the output starts from its hidden state.
        most = self._align_down(len(ids) - 1) if reuse else 0
        own_length, best_length = (
            usable_length(min(shared[each], most), self._alignment, atomic) for each in (slot, best)
        )
        cached = self._prepare_layers(
            slot, own_length, best, best_length, reserve_length=max(reserve_length, len(ids))
        )
        self._uses += 1
        slot.ids, slot.in_use, slot.last_used = prompt[:cached], True, self._uses
        slot.used_at = time.time()
        miss = self._explain_miss(cached_ids if reuse else None, prompt, cached)
        return SlotLease(self, slot, cached=cached, miss=miss)

    def continued_bytes(
        self,
        ids: Sequence[int],
        *,
        reuse: bool = True,
        atomic: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Implements `PrefixCache.continued_bytes`. A lease continues or frees the layers of its
        slot. The slot keeps its place in the LRU order."""
        return self._choose_slot(self._shared_lengths(tuple(ids)))[0].nbytes

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._idle())

    @property
    def num_layers(self) -> int:
        return sum(len(slot.kv) for slot in self._idle())

    def evict(self, num_bytes: int) -> int:
        freed = 0
        for slot in sorted(self._idle(), key=lambda slot: slot.last_used):
            if freed >= num_bytes:
                break
            freed += slot.nbytes
            self._evict(slot)
        return freed

    def clear(self) -> None:
        for slot in self._idle():
            slot.clear()

    def check(self) -> None:
        used = [slot.last_used for slot in self._slots if slot.last_used]
        assert len(used) == len(set(used))
        for slot in self._slots:
            length = len(slot.ids)
            assert slot.kv or not slot.ids
            if slot.in_use:
                assert all(layer.offset >= length for layer in slot.kv)
            else:
                assert self._align_down(length) == length
                assert all(layer.offset == length for layer in slot.kv)

    def snapshot(self, max_nodes: int) -> PrefixSnapshot:
        """Implements `PrefixCache.snapshot`. Each slot that holds tokens is a node without
        relations, because slots share no memory."""
        slots = [slot for slot in self._slots if slot.ids]
        slots.sort(key=lambda slot: slot.last_used, reverse=True)
        return PrefixSnapshot(
            nodes=tuple(
                PrefixNode(
                    parent=None,
                    start=0,
                    tokens=len(slot.ids),
                    last_used=slot.used_at,
                    running=int(slot.in_use),
                )
                for slot in slots[:max_nodes]
            ),
            total_nodes=len(slots),
        )

    def make_layers(self, *, reserve_length: int) -> Sequence[Layer]:
        kv = self._make_kv()
        for layer in kv:
            layer.reserve(reserve_length)
        return kv

    def store_prefix(
        self, slot: _Slot[Layer], ids: Sequence[int], *, keep: int, shareable: int
    ) -> None:
        """Stores the caches when a lease ends.

        keep: the number of tokens to store.
        shareable: the number of stored tokens that other prompts may reuse.
        """
        keep = min(keep, shareable)
        for length in list_stored_lengths(slot.kv, len(ids), keep, self._alignment):
            if length <= shareable and can_trim_to(slot.kv, length):
                trim_to(slot.kv, length)
                slot.ids, slot.in_use = tuple(ids[:length]), False
                self._copy_states(slot)
                return
        slot.clear()

    def _copy_states(self, slot: _Slot[Layer]) -> None:
        """Copies the states of layers that cannot be sliced. Such a state may be a view of a batch,
        which would keep the whole batch in memory."""
        if not all(layer.sliceable for layer in slot.kv):
            slot.kv = [layer if layer.sliceable else layer.copy() for layer in slot.kv]
            self._evaluate(slot.kv)

    def _shared_lengths(self, prompt: tuple[int, ...]) -> Mapping[_Slot[Layer], int]:
        """Returns the number of tokens that each slot shares with the prompt."""
        return {
            slot: self._align_down(common_prefix_length(slot.ids, prompt)) for slot in self._slots
        }

    def _choose_slot(self, shared: Mapping[_Slot[Layer], int]) -> tuple[_Slot[Layer], _Slot[Layer]]:
        """Returns the slot to use, and the slot with the longest common prefix. Ties are broken by
        position."""
        idle = self._idle()
        assert idle, "there are more sequences than slots"
        if not self.shares_live:
            # Also used if no prefix is shared, so that the memory of this slot is reused.
            slot = max(idle, key=shared.__getitem__)
            return slot, slot
        best = max(self._slots, key=shared.__getitem__)
        if not best.in_use and shared[best] == len(best.ids):
            return best, best  # the prompt extends the slot, so no cached token is lost
        return min(idle, key=lambda slot: slot.last_used), best

    def _prepare_layers(
        self,
        slot: _Slot[Layer],
        own_length: int,
        best: _Slot[Layer],
        best_length: int,
        *,
        reserve_length: int,
    ) -> int:
        """Prepares the layers of the slot, and returns the number of tokens in them.

        own_length: the number of tokens available in the slot itself, which is preferred on a
            tie because no copy is needed.
        best_length: the number of tokens available from the best slot.
        """
        own_length = own_length if can_trim_to(slot.kv, own_length) else 0
        # A copy can be trimmed to the same lengths as its source.
        if best is not slot and best_length > own_length and can_trim_to(best.kv, best_length):
            self._fork(best, slot, best_length, reserve_length=reserve_length)
            return best_length
        if own_length == 0:
            self._evict(slot)
            slot.kv = self.make_layers(reserve_length=reserve_length)
            return 0
        trim_to(slot.kv, own_length)
        slot.ids = slot.ids[:own_length]
        for layer in slot.kv:
            layer.reserve(reserve_length)
        return own_length

    def _fork(
        self, donor: _Slot[Layer], slot: _Slot[Layer], length: int, *, reserve_length: int
    ) -> None:
        self._evict(slot)  # so that old layers and copies are never in memory at once
        kv = list(self.make_layers(reserve_length=reserve_length))
        for index, layer in enumerate(donor.kv):
            if layer.sliceable:
                kv[index].append(layer, 0, length)
            else:
                kv[index] = layer.copy()
                kv[index].trim(layer.offset - length)
        self._evaluate(kv)
        slot.ids, slot.kv = donor.ids[:length], kv

    def _explain_miss(
        self, cached_ids: tuple[int, ...] | None, ids: tuple[int, ...], cached: int
    ) -> CacheMiss | None:
        """Returns the reason for a cache miss. `cached_ids` contains the tokens of the slot with
        the longest common prefix; None if reuse is disabled."""
        most = self._align_down(len(ids) - 1)
        if cached == most:
            return None
        if cached_ids is None:
            return CacheMiss(position=0, reason="unwanted")
        shared = common_prefix_length(cached_ids, ids)
        return explain_miss(
            shared=shared,
            usable=min(self._align_down(shared), most),
            cached=cached,
            cached_ids=cached_ids[shared:],
        )

    def _evict(self, slot: _Slot[Layer]) -> None:
        self.evictions += bool(slot.ids)
        slot.clear()

    def _idle(self) -> list[_Slot[Layer]]:
        return [slot for slot in self._slots if not slot.in_use]

    def _align_down(self, length: int) -> int:
        return length - length % self._alignment


class SlotLease(Generic[Layer]):
    """A slot leased to one sequence. A lease ends exactly once."""

    checkpoint_positions: Sequence[int] = ()

    def __init__(
        self,
        cache: SlotPrefixCache[Layer],
        slot: _Slot[Layer],
        *,
        cached: int,
        miss: CacheMiss | None,
    ) -> None:
        self._cache = cache
        self._slot: _Slot[Layer] | None = slot
        self._shareable = sys.maxsize  # the number of tokens that other prompts may reuse
        self.cached = cached
        self.miss = miss

    @property
    def kv(self) -> Sequence[Layer]:
        return () if self._slot is None else self._slot.kv

    def publish(self, ids: Sequence[int]) -> None:
        slot = self._active_slot()
        assert all(layer.offset >= len(ids) for layer in self.kv)
        slot.ids = tuple(ids[: self._shareable])

    def shift(
        self,
        ids: Sequence[int],
        *,
        num_keep: int,
        remove: Callable[[Sequence[Layer], int, int], bool],
    ) -> ShiftResult:
        """If the context is full, removes the older half of the tokens after the first `num_keep`.

        ids: all tokens in the layers, in order.
        num_keep: the number of tokens to keep at the start. It is less than the context length.
        remove: remove(kv, start, end) removes positions [start, end) from the layers and moves the
            following positions up (`Model.shift`). If the layers do not support this, it returns
            False and changes nothing, and the lease restarts with fresh layers.

            before   [ keep | discarded | rest ....... | ]     len(ids) positions
            after    [ keep | rest ....... |             ]     `ShiftResult.ids`; either all or none
                                                           of them are computed

        Does nothing if the context is not full. When the shifted positions were computed, they
        attended to the discarded tokens, which is not the case for the same tokens in another
        prompt. Other prompts can therefore reuse at most the kept part, both now and after
        `commit`.
        """
        slot = self._active_slot()
        assert all(layer.offset == len(ids) for layer in self.kv)
        discard = count_discarded(context=self._cache.context, length=len(ids), num_keep=num_keep)
        if discard == 0:
            return ShiftResult(ids=tuple(ids), num_computed=len(ids))
        left = (*ids[:num_keep], *ids[num_keep + discard :])
        if remove(self.kv, num_keep, num_keep + discard):
            assert all(layer.offset == len(left) for layer in self.kv)
            self._shareable = min(self._shareable, num_keep)
            slot.ids = slot.ids[: self._shareable]
            return ShiftResult(ids=left, num_computed=len(left))
        self._shareable = sys.maxsize
        slot.ids = slot.kv = ()
        slot.kv = self._cache.make_layers(reserve_length=len(ids))
        return ShiftResult(ids=left, num_computed=0)

    def commit(self, ids: Sequence[int], *, keep: int) -> None:
        slot, self._slot = self._active_slot(), None
        try:
            self._cache.store_prefix(slot, ids, keep=keep, shareable=self._shareable)
        except BaseException:
            slot.clear()
            raise

    def discard(self) -> None:
        self._active_slot().clear()
        self._slot = None

    def _active_slot(self) -> _Slot[Layer]:
        assert self._slot is not None, "the lease has ended"
        return self._slot


def create_cache(config: PrefixCacheConfig) -> SlotPrefixCache[LayerCache]:
    return SlotPrefixCache(
        config.make_kv,
        slots=config.num_slots,
        context=config.context,
        multi_user=config.multi_user,
        evaluate=config.evaluate,
        alignment=config.alignment,
    )
