"""One remembered sequence: the cheapest prefix cache that helps a chat.

Knows: ids and layer caches as `LayerKV`. Must not know: tensors, models, requests.

The semantics are those of Ollama's mlxrunner (x/mlxrunner/cache.go of March 2026): longest common
prefix; one id is always left to evaluate; cut back where every layer can be, else start afresh.
Invariant: while the entry is here, every layer's offset is len(entry.ids).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from app.core.ports import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry(Generic[Layer]):
    ids: tuple[int, ...]
    kv: Sequence[Layer]


class SinglePrefixCache(Generic[Layer]):
    """make_kv: fresh layer caches. grid: prefixes end at multiples of it only (see `--exact`)."""

    def __init__(self, make_kv: Callable[[], Sequence[Layer]], *, grid: int = 1) -> None:
        assert grid > 0
        self._make_kv = make_kv
        self._grid = grid
        self._entry: _Entry[Layer] | None = None

    def begin(self, ids: Sequence[int]) -> "SingleLease[Layer]":
        assert ids, "an empty prompt has nothing to evaluate"
        entry, self._entry = self._entry, None
        if entry is not None:
            # the last id must be evaluated: its hidden state is where the answer starts
            shared = self._floor(min(_common_prefix(entry.ids, ids), len(ids) - 1))
            excess = len(entry.ids) - shared
            if shared > 0 and all(layer.can_trim(excess) for layer in entry.kv):
                for layer in entry.kv:
                    layer.trim(excess)
                return SingleLease(self, entry.kv, cached=shared)
        return SingleLease(self, self._make_kv(), cached=0)

    @property
    def nbytes(self) -> int:
        return 0 if self._entry is None else sum(layer.nbytes for layer in self._entry.kv)

    def clear(self) -> None:
        self._entry = None

    def check(self) -> None:
        if self._entry is None:
            return
        length = len(self._entry.ids)
        assert length > 0
        assert self._floor(length) == length
        assert all(layer.offset == length for layer in self._entry.kv)

    def remember(self, ids: Sequence[int], kv: Sequence[Layer], *, keep: int) -> None:
        """Called by a lease that ends. Whatever was remembered before gives way."""
        # layers may differ after a step that failed half-way: only what all of them got counts
        offset = min(min((layer.offset for layer in kv), default=0), len(ids))
        wanted = self._floor(min(offset, keep))
        # where a layer cannot be cut to what was wanted, remember all: longer, but as true
        lengths = (wanted, offset) if self._grid == 1 else (wanted,)
        for length in lengths:
            if length > 0 and all(layer.can_trim(layer.offset - length) for layer in kv):
                for layer in kv:
                    layer.trim(layer.offset - length)
                self._entry = _Entry(ids=tuple(ids[:length]), kv=kv)
                return

    def _floor(self, length: int) -> int:
        return length - length % self._grid


class SingleLease(Generic[Layer]):
    """Layer caches on loan to one sequence; ends once."""

    def __init__(
        self, cache: SinglePrefixCache[Layer], kv: Sequence[Layer], *, cached: int
    ) -> None:
        self._cache: SinglePrefixCache[Layer] | None = cache
        self.kv: Sequence[Layer] = kv
        self.cached = cached

    def commit(self, ids: Sequence[int], *, keep: int) -> None:
        assert self._cache is not None, "the lease has ended"
        self._cache.remember(ids, self.kv, keep=keep)
        self.discard()

    def discard(self) -> None:
        self._cache = None
        self.kv = ()


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))
