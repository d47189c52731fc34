"""The contract of layer caches with prefix caches.

Knows: positions and bytes. Must not know: tensors. `models.kv.LayerCache` is the contract with the
engine.
"""

from typing import Protocol, Self


class LayerKV(Protocol):
    """The part of a layer cache that prefix caches use.

    There are two types of layer caches. A sliceable layer cache stores data per position, and any
    range of positions can be copied and appended to another cache. The other type can be copied
    only as a whole; some of these caches can be trimmed by a few positions.
    """

    @property
    def offset(self) -> int:
        """The number of positions processed so far."""
        ...

    @property
    def nbytes(self) -> int:
        """The number of allocated bytes, including unused capacity."""
        ...

    @property
    def sliceable(self) -> bool:
        """Whether any range of positions can be copied and appended to another cache."""
        ...

    def can_trim(self, count: int) -> bool: ...

    def trim(self, count: int) -> None:
        """Removes the last `count` positions. Valid only if `can_trim(count)` is true."""
        ...

    def copy(self) -> Self:
        """Returns an independent copy without unused capacity."""
        ...

    def slice(self, start: int, end: int) -> Self:
        """Returns an independent copy of positions [start, end), without unused capacity. The
        offset of the copy is end - start. Supported only by sliceable caches."""
        ...

    def append(self, other: Self, start: int, end: int) -> None:
        """Appends a copy of positions [start, end) of `other`. Supported only by sliceable
        caches."""
        ...

    def reserve(self, length: int) -> None:
        """Allocates capacity, so that the cache can grow to `length` positions without copying."""
        ...
