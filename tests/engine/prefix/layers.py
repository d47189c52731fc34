"""Layer caches that hold the ids themselves, so that a wrong trim is detected."""

from collections.abc import Sequence
from dataclasses import dataclass, field

PER_POSITION = 8
PER_STATE = 100


@dataclass
class FakeLayer:
    """kind: k keeps every position; w the last `window` of them; r a sum of all. ids: the content,
    from position 0, or from the start of a slice. reserved: reserved positions (k only)."""

    kind: str = "k"
    window: int = 4
    ids: tuple[int, ...] = ()
    reserved: int = 0
    # number of changes, so that tests can detect writes
    writes: int = field(default=0, compare=False)

    @property
    def offset(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        match self.kind:
            case "k":
                return PER_POSITION * max(len(self.ids), self.reserved)
            case "w":
                return PER_POSITION * min(len(self.ids), self.window)
            case _:
                return PER_STATE if self.ids else 0

    @property
    def sliceable(self) -> bool:
        return self.kind == "k"

    def can_trim(self, count: int) -> bool:
        if count > len(self.ids):
            return False
        if self.kind == "k" or count == 0:
            return True
        return self.kind == "w" and len(self.ids) <= self.window

    def trim(self, count: int) -> None:
        assert self.can_trim(count)
        self.ids = self.ids[: len(self.ids) - count]
        self.writes += 1

    def copy(self) -> "FakeLayer":
        return FakeLayer(self.kind, self.window, self.ids)

    def slice(self, start: int, end: int) -> "FakeLayer":
        assert self.sliceable
        assert 0 <= start <= end <= len(self.ids)
        return FakeLayer(self.kind, self.window, self.ids[start:end])

    def append(self, other: "FakeLayer", start: int, end: int) -> None:
        assert self.sliceable
        assert other.sliceable
        assert 0 <= start <= end <= len(other.ids)
        self.feed(other.ids[start:end])

    def reserve(self, length: int) -> None:
        self.reserved = max(self.reserved, length) if self.sliceable else 0

    def remove(self, start: int, end: int) -> None:
        """Remove positions [start, end), as a context shift does; later ones move up. k only."""
        assert self.sliceable
        self.ids = self.ids[:start] + self.ids[end:]
        self.writes += 1

    def feed(self, ids: Sequence[int]) -> None:
        """Add ids, as a forward pass does."""
        self.ids += tuple(ids)
        self.writes += 1


def layers(kinds: str, window: int = 4) -> list[FakeLayer]:
    """One layer for each letter."""
    return [FakeLayer(kind, window) for kind in kinds]
