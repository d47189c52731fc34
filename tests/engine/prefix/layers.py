"""Layer caches that hold the ids themselves, so that a wrong cut cannot hide."""

from collections.abc import Sequence
from dataclasses import dataclass, field

PER_POSITION = 8
PER_STATE = 100


@dataclass
class FakeLayer:
    """kind: k keeps every position; w the last `window` of them; r a sum of them all. ids: what it
    stands for, from position 0, or from wherever its piece was taken. room: positions there is
    room for (k only)."""

    kind: str = "k"
    window: int = 4
    ids: tuple[int, ...] = ()
    room: int = 0
    # every change, so that tests can tell who was written to
    writes: int = field(default=0, compare=False)

    @property
    def offset(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        match self.kind:
            case "k":
                return PER_POSITION * max(len(self.ids), self.room)
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
        self.room = max(self.room, length) if self.sliceable else 0

    def remove(self, start: int, end: int) -> None:
        """Forget positions [start, end); what follows moves up. k only, as a context shift does."""
        assert self.sliceable
        self.ids = self.ids[:start] + self.ids[end:]
        self.writes += 1

    def feed(self, ids: Sequence[int]) -> None:
        """What a forward pass does."""
        self.ids += tuple(ids)
        self.writes += 1


def layers(kinds: str, window: int = 4) -> list[FakeLayer]:
    """One layer a letter."""
    return [FakeLayer(kind, window) for kind in kinds]
