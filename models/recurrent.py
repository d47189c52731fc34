"""The cache of a recurrent layer.

Knows: tensors. Must not know: tokens, requests, policies. The cache implements the interface of
models/kv.py.
"""

from collections.abc import Sequence
from typing import NoReturn

import mlx.core as mx

from models.attention_route import AttentionShape
from models.batch_cache import BatchRecurrentCache


class RecurrentCache:
    """Recurrent states, such as convolution tails and delta-rule matrices, by slot.

    States cannot be trimmed. They can only be copied before they advance. Accumulating states
    should be float32, regardless of the dtype of the activations.
    """

    sliceable = False
    attention_shapes: Sequence[AttentionShape] = ()

    def __init__(self, slots: int) -> None:
        self.offset = 0
        self._slots: list[mx.array | None] = [None] * slots

    def __getitem__(self, slot: int) -> mx.array | None:
        return self._slots[slot]

    def __setitem__(self, slot: int, value: mx.array) -> None:
        self._slots[slot] = value

    def row_states(self, slot: int) -> list[mx.array | None]:
        """Returns the states of a slot as separate arrays, whose first axes together are the
        rows."""
        return [self._slots[slot]]

    def set_row_states(self, slot: int, states: Sequence[mx.array]) -> None:
        """Replaces the arrays that `row_states` returned."""
        [self._slots[slot]] = states

    def advance(self, length: int) -> None:
        """Advances the offset. The slots now include `length` more positions."""
        self.offset += length

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state())

    def set_dtype(self, dtype: mx.Dtype | None) -> None:
        """Does nothing, because a state accumulates rounding errors."""

    def can_trim(self, count: int) -> bool:
        return count == 0

    def trim(self, count: int) -> None:
        assert self.can_trim(count)

    def reserve(self, length: int) -> None:
        """Does nothing, because a state does not grow."""

    def estimate_nbytes(self, length: int, chunk: int) -> int:
        return self.nbytes

    def slice(self, start: int, end: int) -> NoReturn:
        raise AssertionError("a recurrent state cannot be sliced")

    def append(self, other: "RecurrentCache", start: int, end: int) -> NoReturn:
        raise AssertionError("a recurrent state cannot be appended to")

    def make_batch(
        self, rows: Sequence["RecurrentCache"], positions: mx.array
    ) -> BatchRecurrentCache:
        return BatchRecurrentCache(rows)

    def copy(self) -> "RecurrentCache":
        twin = RecurrentCache(len(self._slots))
        twin.offset = self.offset
        # States are replaced and never modified, so the copy may share them. A state may be a view
        # of a whole batch, which the copy would keep in memory. `contiguous` copies such a state.
        twin._slots = [None if state is None else mx.contiguous(state) for state in self._slots]
        return twin

    def state(self) -> list[mx.array]:
        return [array for array in self._slots if array is not None]
