"""What one render of a chat template may take: time, and text that is made on the way.

Knows: how large values are. Must not know: Jinja, templates, which function makes what.

A step that makes much out of little (`'x' * 10**10`) is weighed before it is taken; one that makes
about as much as it was given is counted afterwards. Both draw on one budget, so that a thousand
steps are no better than one.
"""

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, cast

from app.core.workers import CancelToken

_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)

# values looked at between two looks at the clock
_LOOKS = 1024

# what an element of a list takes, in characters
ELEMENT = 8

# characters of a number, a bracket with its comma, and the like
_SMALL = 4


class Budget:
    """characters: what all steps together may make, as `size` counts it. token: cancelled when the
    render is not needed any more."""

    def __init__(
        self, *, seconds: float, characters: int, token: CancelToken | None = None
    ) -> None:
        self._token = token or CancelToken()
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._characters = self._left = characters

    def check(self) -> None:
        """Raises TimeoutError, Cancelled."""
        self._token.check()
        if time.monotonic() > self._end:
            raise TimeoutError(f"rendering takes longer than {self._seconds:g} seconds")

    def afford(self, count: int) -> None:
        """Raises MemoryError if `count` characters are more than is left."""
        if count > self._left:
            raise MemoryError(f"rendering produces more than {self._characters} characters")

    def spend(self, made: object) -> None:
        """Count what was made. Raises as `afford` does."""
        count = size(made)
        self.afford(count)
        self._left -= count

    def pace(self, items: Iterable[Any]) -> Iterator[Any]:
        """The same, with a look at the clock before each."""
        for item in items:
            self.check()
            yield item

    def join(self, pieces: Iterable[str]) -> str:
        """One text, counted before it is made."""
        held: list[str] = []
        total = 0
        for piece in pieces:
            held.append(piece)
            total += len(piece)
            self.afford(total)
        self._left -= total
        return "".join(held)

    def weigh(self, value: object) -> int:
        """About how many characters `value` is written in; what it contains many times is written
        as often. Raises as `afford` and `check` do, and stops as early."""
        if isinstance(value, str | bytes):
            return len(value)
        total, looked = 0, 0
        todo: list[Any] = [value]
        while todo:
            item = todo.pop()
            looked += 1
            if looked % _LOOKS == 0:
                self.check()
            total += len(item) if isinstance(item, str | bytes) else _SMALL
            inner = _inner(item)
            # before the list of what is to be looked at grows by it
            self.afford(total + len(todo) + len(inner))
            todo += inner
        return total


def size(value: object) -> int:
    """What a value takes by itself, in characters: what it contains is somewhere else too."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple | dict | set):
        return ELEMENT * len(cast("list[Any]", value))
    return 0


def _inner(value: object) -> list[Any]:
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return [*mapping.keys(), *mapping.values()]
    return list(cast("list[Any]", value)) if isinstance(value, _CONTAINERS) else []
