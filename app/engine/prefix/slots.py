"""A prefix cache with a fixed number of slots, one for each concurrent sequence, like Ollama's.

Knows: ids and layer caches as `LayerKV`. Must not know: tensors, models, requests.

The semantics are those of Ollama's llamarunner (InputCache in runner/llamarunner/cache.go of
February 2025). One user: the idle slot that shares the longest prefix with the prompt is used. Many
users: the prefix of the slot that shares most, busy or idle, is copied to the least recently used
idle slot. Differences: layers that cannot be trimmed are never assumed to be trimmable; and shifted
positions are reused only by the sequence that shifted them.

    idle slot    ids     [ .............................. ]
                 layers  [ .............................. ]
    busy slot    ids     [ passed to `publish` ..... ]             these may be copied
                 layers  [ ......................... | growing ]   the first part never changes
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from app.core.context_shift import ShiftResult, count_discarded
from app.core.jobs import CacheMiss
from app.core.ports import Layer
from app.engine.prefix.matching import can_trim_to, common_prefix_length, trim_to
from app.engine.prefix.policy import PrefixCacheConfig
from models.kv import LayerCache

# number of cached ids that a miss reports: enough to recognise them in a log
_MISS_IDS_SHOWN = 8


# compared by identity: two empty slots are different
@dataclass(slots=True, eq=False)
class _Slot(Generic[Layer]):
    """last_used: when its last use began, as a unique counter value; 0 for an empty slot, which is
    therefore the oldest. With a clock, two slots could have the same reading, and the order would
    depend on the speed of the machine."""

    ids: tuple[int, ...] = ()
    kv: Sequence[Layer] = ()
    in_use: bool = False
    last_used: int = 0

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.kv)

    def clear(self) -> None:
        self.ids, self.kv, self.in_use, self.last_used = (), (), False, 0


class SlotPrefixCache(Generic[Layer]):
    """make_kv: makes fresh layer caches. slots: concurrent sequences. context: positions of one
    sequence. multi_user: how a slot is chosen. evaluate: called with copied layers before they are
    written to. alignment: prefixes end at multiples of it only (see `--exact`)."""

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
        self._multi_user = multi_user
        self._evaluate = evaluate
        self._alignment = alignment
        self._uses = 0
        self._evictions = 0

    def begin(
        self,
        ids: Sequence[int],
        *,
        turn_ends: Sequence[int] = (),
        reuse: bool = True,
        reserve_length: int = 0,
    ) -> "SlotLease[Layer]":
        """See `PrefixCache`. turn_ends is ignored: a slot stores no intermediate states."""
        assert ids, "an empty prompt has nothing to evaluate"
        prompt = tuple(ids)
        shared = {
            slot: self._align_down(common_prefix_length(slot.ids, prompt)) for slot in self._slots
        }
        slot, best = self._choose_slot(shared)
        had = best.ids  # before the slot, which may be the same one, is cut
        # the last id must be evaluated: the output starts from its hidden state
        most = self._align_down(len(ids) - 1) if reuse else 0
        own, lent = min(shared[slot], most), min(shared[best], most)
        cached = self._prepare_layers(
            slot, own, best, lent, reserve_length=max(reserve_length, len(ids))
        )
        self._uses += 1
        slot.ids, slot.in_use, slot.last_used = prompt[:cached], True, self._uses
        miss = self._explain_miss(had if reuse else None, prompt, cached)
        return SlotLease(self, slot, cached=cached, miss=miss)

    @property
    def shares_live(self) -> bool:
        return self._multi_user

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._idle())

    @property
    def evictions(self) -> int:
        return self._evictions

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

    def make_layers(self, *, reserve_length: int) -> Sequence[Layer]:
        kv = self._make_kv()
        for layer in kv:
            layer.reserve(reserve_length)
        return kv

    def store_prefix(
        self, slot: _Slot[Layer], ids: Sequence[int], *, keep: int, shareable: int
    ) -> None:
        """Called by a lease that ends. keep: how many of the ids to store. shareable: how many of
        them other prompts may reuse."""
        # layers may differ after a step that failed half-way: use what all of them have
        offset = min(min((layer.offset for layer in slot.kv), default=0), len(ids))
        wanted = self._align_down(min(offset, keep, shareable))
        # if a layer cannot be trimmed to the wanted length, store all: longer, but also valid
        lengths = (wanted, offset) if self._alignment == 1 and offset <= shareable else (wanted,)
        for length in lengths:
            if length > 0 and can_trim_to(slot.kv, length):
                trim_to(slot.kv, length)
                slot.ids, slot.in_use = tuple(ids[:length]), False
                self._copy_states(slot)
                return
        slot.clear()

    def _copy_states(self, slot: _Slot[Layer]) -> None:
        """Copies states of indivisible layers: one may be a view of a whole batch, which it would
        keep in memory."""
        if not all(layer.sliceable for layer in slot.kv):
            slot.kv = [layer if layer.sliceable else layer.copy() for layer in slot.kv]
            self._evaluate(slot.kv)

    def _choose_slot(self, shared: Mapping[_Slot[Layer], int]) -> tuple[_Slot[Layer], _Slot[Layer]]:
        """The slot to use, and the one that shares most with the prompt. The first wins ties."""
        idle = self._idle()
        assert idle, "more sequences than slots"
        if not self._multi_user:
            # also if nothing is shared: then the same memory is used again
            slot = max(idle, key=shared.__getitem__)
            return slot, slot
        best = max(self._slots, key=shared.__getitem__)
        if not best.in_use and shared[best] == len(best.ids):
            return best, best  # the prompt only extends it: nothing is lost
        return min(idle, key=lambda slot: slot.last_used), best

    def _prepare_layers(
        self, slot: _Slot[Layer], own: int, best: _Slot[Layer], lent: int, *, reserve_length: int
    ) -> int:
        """Prepare the slot's layers; returns the number of ids that they hold. own, lent: ids
        available from the slot itself, and from the best one. Its own are preferred on a tie,
        because that copies nothing."""
        own = own if can_trim_to(slot.kv, own) else 0
        # a copy can be trimmed where its source can
        if best is not slot and lent > own and can_trim_to(best.kv, lent):
            self._fork(best, slot, lent, reserve_length=reserve_length)
            return lent
        if own == 0:
            self._evict(slot)
            slot.kv = self.make_layers(reserve_length=reserve_length)
            return 0
        trim_to(slot.kv, own)
        slot.ids = slot.ids[:own]
        for layer in slot.kv:
            layer.reserve(reserve_length)
        return own

    def _fork(
        self, donor: _Slot[Layer], slot: _Slot[Layer], length: int, *, reserve_length: int
    ) -> None:
        self._evict(slot)  # first, so that old layers and copies are never in memory together
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
        self, had: tuple[int, ...] | None, ids: tuple[int, ...], cached: int
    ) -> CacheMiss | None:
        """had: ids of the slot that shared most with the prompt; None if reuse was off."""
        most = self._align_down(len(ids) - 1)
        if cached == most:
            return None
        if had is None:
            return CacheMiss(position=0, reason="unwanted")
        shared = common_prefix_length(had, ids)
        if cached < min(self._align_down(shared), most):
            return CacheMiss(position=cached, reason="no_state")
        if shared == 0:
            return CacheMiss(position=0, reason="empty")
        # with an alignment this may be after `cached`: report where the ids actually diverge
        return CacheMiss(
            position=shared, reason="diverged", cached_ids=had[shared : shared + _MISS_IDS_SHOWN]
        )

    def _evict(self, slot: _Slot[Layer]) -> None:
        self._evictions += bool(slot.ids)
        slot.clear()

    def _idle(self) -> list[_Slot[Layer]]:
        return [slot for slot in self._slots if not slot.in_use]

    def _align_down(self, length: int) -> int:
        return length - length % self._alignment


class SlotLease(Generic[Layer]):
    """A slot leased to one sequence; ends once."""

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
        self._shareable = sys.maxsize  # how many of the ids other prompts may reuse
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
        """Free part of a full context by removing the older half of what follows `num_keep` ids.

        ids: everything that was evaluated into the layers, in order. num_keep: fewer than the
        context has. remove(kv, start, end): removes positions [start, end) from the layers and
        moves the later ones up (`Model.shift`); returns False, with nothing changed, if they
        cannot. Then the lease starts again with fresh layers.

            before   [ keep | discarded | rest ....... | ]     len(ids) positions
            after    [ keep | rest ....... |             ]     `ShiftResult.ids`; all or none are
                                                               evaluated

        Changes nothing if the context is not full. The positions that move up attended to the
        discarded ids when they were evaluated; those of a prompt with the same ids would not. So
        other prompts, now and after `commit`, reuse at most the kept part.
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
        self._cache.store_prefix(self._active_slot(), ids, keep=keep, shareable=self._shareable)
        self._slot = None

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
