"""Chooses the layout of the layer caches in a decode step: separate rows, or slots in a slab.

Knows: lengths and numbers of rows. Must not know: tensors, sequences, devices. Pure functions.

A slab (models/kv_slab.py) computes the attention of all rows with one operation, and pads each row
to the longest one. It pays if there are several rows of similar lengths.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from app.core.settings import KVLayout


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
    """Returns the number of padded positions per real position, for rows of these lengths in so
    many slots."""
    return max(lengths) * max(slots, len(lengths)) / max(1, sum(lengths))


def choose_slab_rows(
    lengths: Sequence[int], slots: Sequence[int | None], policy: SlabPolicy
) -> SlabChoice:
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


def _largest_group(lengths: Sequence[int], policy: SlabPolicy) -> frozenset[int]:
    """Returns the largest group of rows whose padding is small enough; if there are several, the
    one with the longest rows. Empty if there are too few rows."""
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    best: Sequence[int] = ()
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
    """Returns the number of slots of a slab for so many rows. It is a power of two, at least
    eight, so that only few joins copy the slab. most: the maximum number of rows."""
    return min(max(most, rows), 1 << max(3, (rows - 1).bit_length()))
