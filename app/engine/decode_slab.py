"""The slabs of the sequences that decode together, and the rows in them.

Knows: sequences, layer caches, the memory budget of slabs. Must not know: the model, sampling,
scheduling.

A slab (models/kv_slab.py) computes the attention of all rows with one operation, and pads each row
to the longest one. It pays off if there are several rows of similar lengths, which
`choose_slab_rows` selects.

    arrange     before each decode step: rows leave, the slab grows or is created, rows join
    make_batch  the caches of the step
    settle      copies a row's new positions to its own caches, for the prefix cache
    leave       settle, and free the slot

The caches of a sequence remain complete up to the position at which it joined or was settled last.
The memory ledger counts them as before, and the slabs in addition. Therefore a slab can be dropped
at any time (`dissolve`), and no sequence loses memory that it has reserved.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import mlx.core as mx

from app.core.settings import KVLayout
from app.engine.scheduler import Scheduler
from app.engine.sequence import Sequence
from models.kv import LayerCache, get_position_delta, round_up_to_step
from models.slab_step import LayerSlab, SlabRow, SlabStep
from models.slabs import (
    create_slab,
    fits_buffers,
    is_recurrent,
    slab_bytes,
    supports_slab,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabPolicy:
    """When rows share a slab.

    layout: see `--kv-layout`. Only "slab" uses slabs.
    min_rows: the number of rows for which a slab is created.
    join_padding: the maximum number of padded positions per real position if rows join.
    stay_padding: the same for rows that are in the slab already. It is larger, because leaving and
        joining copies the positions of a row.
    """

    layout: KVLayout = "auto"
    min_rows: int = 3
    join_padding: float = 1.3
    stay_padding: float = 2.0


DEFAULT_SLAB_POLICY = SlabPolicy()


@dataclass(frozen=True, slots=True)
class SlabChoice:
    """The rows that should have a slot in the next step. rebuild: whether the rows that have a slot
    now must leave first, so that they get others, or none."""

    rows: frozenset[int]
    rebuild: bool = False


def measure_padding(lengths: Collection[int], slots: int) -> float:
    """Returns the number of padded positions per real position, for rows of these lengths in this
    many slots."""
    return max(lengths) * max(slots, len(lengths)) / max(1, sum(lengths))


def choose_slab_rows(lengths: Ids[int], slots: Ids[int | None], policy: SlabPolicy) -> SlabChoice:
    """Chooses the rows that share a slab. lengths: the number of positions of each row. slots: the
    slot of each row; None for a row without one."""
    chosen = {row for row, slot in enumerate(slots) if slot is not None}
    span = 1 + max((slot for slot in slots if slot is not None), default=-1)
    too_few = len(chosen) < min(2, policy.min_rows)
    if too_few or measure_padding([lengths[row] for row in chosen], span) > policy.stay_padding:
        return SlabChoice(_largest_group(lengths, policy), rebuild=True)
    others = sorted(set(range(len(lengths))) - chosen, key=lambda row: (-lengths[row], row))
    for row in others:
        before = measure_padding([lengths[i] for i in chosen], span)
        after = measure_padding([lengths[i] for i in (*chosen, row)], span)
        if after <= max(before, policy.join_padding):
            chosen.add(row)
    return SlabChoice(frozenset(chosen))


def _largest_group(lengths: Ids[int], policy: SlabPolicy) -> frozenset[int]:
    """Returns the largest group of rows whose padding is small enough; if there are several, the
    one with the longest rows. Empty if there are too few rows."""
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    best: Ids[int] = ()
    for end in range(len(order), 0, -1):
        if end <= len(best):
            break
        # Each row below the limit adds padding that rows above it must offset.
        needed = lengths[order[end - 1]] / policy.join_padding
        start, excess = end, 0.0
        while start > 0 and excess + lengths[order[start - 1]] >= needed:
            start -= 1
            excess += lengths[order[start]] - needed
        if end - start > len(best):
            best = order[start:end]
    return frozenset(best) if len(best) >= policy.min_rows else frozenset()


def count_slots(rows: int, most: int) -> int:
    """Returns the number of slots of a slab for this many rows. It is a power of two, at least
    eight, so that few joins copy the slab. most: the maximum number of rows."""
    return min(max(most, rows), 1 << max(3, (rows - 1).bit_length()))


def create_decode_slab(
    policy: SlabPolicy, scheduler: Scheduler, *, max_rows: int
) -> "DecodeSlab | None":
    """Returns None if this policy never uses slabs. max_rows: see `DecodeSlab`."""
    if policy.layout != "slab":
        return None
    return DecodeSlab(policy, scheduler, max_rows=max_rows)


@dataclass(slots=True, kw_only=True)
class _Slabs:
    """The slabs of all layers; None for a layer whose rows remain separate.

    rows: the number of rows for which memory is reserved in recurrent layers.
    written: the number of positions that were written to each slot.
    """

    layers: list[LayerSlab | None]
    slots: int
    capacity: int
    rows: int
    written: list[int]

    @property
    def present(self) -> list[LayerSlab]:
        return [slab for slab in self.layers if slab is not None]


class DecodeSlab:
    """The slabs of one engine.

    max_rows: the maximum number of sequences.
    """

    def __init__(
        self,
        policy: SlabPolicy,
        scheduler: Scheduler,
        *,
        max_rows: int,
    ) -> None:
        self._policy = policy
        self._scheduler = scheduler
        self._max_rows = max_rows
        self._suitable: list[bool] | None = None  # by layer, once a cache has content
        self._slabs: _Slabs | None = None
        # The members. None: separate in attention layers, because the length is too different.
        self._slots: dict[Sequence, int | None] = {}

    @property
    def nbytes(self) -> int:
        """The size of the slabs."""
        return sum(slab.nbytes for slab in self.layers)

    @property
    def layers(self) -> Ids[LayerSlab]:
        """The slabs, without the layers whose rows remain separate."""
        return () if self._slabs is None else self._slabs.present

    @property
    def slots(self) -> Mapping[Sequence, int | None]:
        """The members and their slots. A member without a slot shares only recurrent layers."""
        return self._slots

    def arrange(self, sequences: Ids[Sequence]) -> Ids[Sequence]:
        """Decides which of the sequences share a slab in the next decode step, and copies those
        that join. Returns the sequences in the order of the rows of the step."""
        for sequence in set(self._slots).difference(sequences):
            self.leave(sequence)
        suitable = self._find_suitable(sequences[0].kv)
        if len(sequences) < min(2, self._policy.min_rows) or not any(suitable):
            self.dissolve()
            return sequences
        choice = choose_slab_rows(
            [s.num_computed_tokens for s in sequences],
            [self._slots.get(s) for s in sequences],
            self._policy,
        )
        chosen = [sequences[row] for row in sorted(choice.rows)]
        if choice.rebuild:
            for sequence in [s for s, slot in self._slots.items() if slot is not None]:
                self.leave(sequence)
        if not self._make_room(chosen, sequences, suitable) or self._slabs is None:
            self.dissolve()
            return sequences
        self._join([s for s in chosen if self._slots.get(s) is None])
        for sequence in sequences:
            self._slots.setdefault(sequence, None)
            sequence.slab = self
        return sorted(sequences, key=self._row_order)

    def make_batch(self, sequences: Ids[Sequence]) -> Ids[object]:
        """Returns the caches for one new position of each sequence, one per layer. sequences: the
        result of `arrange`."""
        assert self._slabs is not None
        assert len(sequences) == len(self._slots)
        step = SlabStep([self._row(sequence) for sequence in sequences])
        layers: Ids[tuple[LayerCache, ...]] = list(zip(*(s.kv for s in sequences), strict=True))
        return [
            rows[0].make_batch(rows, step.positions)
            if slab is None
            else slab.make_batch(step, rows)
            for slab, rows in zip(self._slabs.layers, layers, strict=True)
        ]

    def settle(self, sequence: Sequence) -> None:
        """Copies the positions that only the slabs contain to the caches of the sequence."""
        assert self._slabs is not None
        row = self._row(sequence)
        for slab, cache in zip(self._slabs.layers, sequence.kv, strict=True):
            if slab is not None:
                slab.copy_out(row, cache)
        # Dispatched at once: a pending copy references the slab, which the next write would then
        # have to copy.
        mx.async_eval([array for cache in sequence.kv for array in cache.state()])

    def leave(self, sequence: Sequence) -> None:
        """Settles a sequence, and removes it."""
        self.settle(sequence)
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Removes a sequence, which loses the positions that only the slabs contain."""
        assert self._slabs is not None
        slot = self._slots.pop(sequence)
        sequence.slab = None
        if not self._slots:
            self._slabs = None
            self._reserve_memory(0)
            return
        if slot is not None:
            # the last step may have failed after it wrote a position
            written = max(self._slabs.written[slot], sequence.num_computed_tokens + 1)
            self._slabs.written[slot] = written
        for slab in self._slabs.present:
            slab.leave(sequence)

    def dissolve(self) -> None:
        """Gives up the slabs and their memory. All sequences continue with their own caches."""
        for sequence in list(self._slots):
            self.leave(sequence)

    def _find_suitable(self, layers: Ids[LayerCache]) -> list[bool]:
        if self._suitable is None:
            self._suitable = [supports_slab(layer) for layer in layers]
        return self._suitable

    def _make_room(
        self, chosen: Collection[Sequence], sequences: Ids[Sequence], suitable: Ids[bool]
    ) -> bool:
        """Creates or grows the slabs, so that each of the chosen sequences has a slot for one more
        position. Returns False if there is not enough memory. Without chosen sequences, only
        recurrent layers get a slab."""
        slabs, like = self._slabs, sequences[0].kv
        longest = max((s.num_computed_tokens + 1 for s in chosen), default=0)
        if slabs is not None and (
            len(chosen) <= slabs.slots
            and longest <= slabs.capacity
            and len(sequences) <= slabs.rows
        ):
            return True
        wanted = [layer for layer, suits in zip(like, suitable, strict=True) if suits]
        if not chosen and not any(is_recurrent(layer) for layer in wanted):
            return True
        rows = count_slots(len(sequences), self._max_rows)
        slots, capacity = 0, 0
        if chosen:
            slots = count_slots(len(chosen), self._max_rows)
            capacity = round_up_to_step(max(longest, *(s.reserved_positions for s in chosen)))
        if slabs is not None:
            slots, capacity = max(slots, slabs.slots), max(capacity, slabs.capacity)
        if not all(fits_buffers(layer, slots, capacity) for layer in wanted):
            return False
        num_bytes = sum(slab_bytes(layer, slots, capacity, rows) for layer in wanted)
        if not self._reserve_memory(self.nbytes + num_bytes):
            return False
        if slabs is None:
            layers = [
                create_slab(layer) if suits else None
                for layer, suits in zip(like, suitable, strict=True)
            ]
            slabs = self._slabs = _Slabs(layers=layers, slots=0, capacity=0, rows=0, written=[])
        if (slots, capacity) != (slabs.slots, slabs.capacity):
            for slab in slabs.present:
                slab.grow(slots, capacity)
                mx.async_eval(slab.state())
            if slabs.slots:  # the old buffers are in memory until they are copied
                mx.eval([array for slab in slabs.present for array in slab.state()])
        self._reserve_memory(num_bytes)
        slabs.written += [0] * (slots - slabs.slots)
        slabs.slots, slabs.capacity, slabs.rows = slots, capacity, rows
        return True

    def _join(self, joining: Ids[Sequence]) -> None:
        """Copies the positions of these sequences to free slots."""
        slabs = self._slabs
        if slabs is None or not joining:
            return
        taken = set(self._slots.values())
        free = [slot for slot in range(slabs.slots) if slot not in taken]
        for slot, sequence in zip(free, joining, strict=False):
            if sequence in self._slots:
                self.settle(sequence)
            assert all(layer.offset == sequence.num_computed_tokens for layer in sequence.kv)
            for slab, cache in zip(slabs.layers, sequence.kv, strict=True):
                if slab is not None:
                    slab.join(slot, cache, clear_to=slabs.written[slot])
            self._slots[sequence] = slot
        # Dispatched now, so that the device copies while the graph of the step is built.
        mx.async_eval([array for slab in slabs.present for array in slab.state()])

    def _reserve_memory(self, num_bytes: int) -> bool:
        return self._scheduler.reserve_slab(num_bytes, give_back=self.dissolve)

    def _row(self, sequence: Sequence) -> SlabRow:
        return SlabRow(
            key=sequence,
            slot=self._slots[sequence],
            offset=sequence.num_computed_tokens,
            position_delta=get_position_delta(sequence.kv),
        )

    def _row_order(self, sequence: Sequence) -> tuple[bool, int]:
        slot = self._slots[sequence]
        return slot is None, slot or 0
