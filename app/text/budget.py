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
_CLOCK_CHECK_INTERVAL = 1024

# what an element of a list takes, in characters
ELEMENT_CHARACTERS = 8

# characters of a number, a bracket with its comma, and the like
_SCALAR_CHARACTERS = 4


class RenderCostLimit:
    """characters: what all steps together may make, as `size` counts it. cancel_token: cancelled
    when the render is not needed any more."""

    def __init__(
        self, *, seconds: float, characters: int, cancel_token: CancelToken | None = None
    ) -> None:
        self._cancel_token = cancel_token or CancelToken()
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._max_characters = self._remaining = characters

    def check_time(self) -> None:
        """Raises TimeoutError, Cancelled."""
        self._cancel_token.check()
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"rendering takes longer than {self._seconds:g} seconds")

    def check_size(self, count: int) -> None:
        """Raises MemoryError if `count` characters are more than is left."""
        if count > self._remaining:
            raise MemoryError(f"rendering produces more than {self._max_characters} characters")

    def charge(self, value: object) -> None:
        """Count what was made. Raises as `afford` does."""
        count = shallow_size(value)
        self.check_size(count)
        self._remaining -= count

    def iterate(self, items: Iterable[Any]) -> Iterator[Any]:
        """The same, with a look at the clock before each."""
        for item in items:
            self.check_time()
            yield item

    def join(self, parts: Iterable[str]) -> str:
        """One text, counted before it is made."""
        held: list[str] = []
        total = 0
        for piece in parts:
            held.append(piece)
            total += len(piece)
            self.check_size(total)
        self._remaining -= total
        return "".join(held)

    def measure(self, value: object) -> int:
        """About how many characters `value` is written in; what it contains many times is written
        as often. Raises as `afford` and `check` do, and stops as early."""
        if isinstance(value, str | bytes):
            return len(value)
        total, looked = 0, 0
        todo: list[Any] = [value]
        while todo:
            item = todo.pop()
            looked += 1
            if looked % _CLOCK_CHECK_INTERVAL == 0:
                self.check_time()
            total += len(item) if isinstance(item, str | bytes) else _SCALAR_CHARACTERS
            inner = _children(item)
            # before the list of what is to be looked at grows by it
            self.check_size(total + len(todo) + len(inner))
            todo += inner
        return total


def shallow_size(value: object) -> int:
    """What a value takes by itself, in characters: what it contains is somewhere else too."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple | dict | set):
        return ELEMENT_CHARACTERS * len(cast("list[Any]", value))
    return 0


def _children(value: object) -> list[Any]:
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return [*mapping.keys(), *mapping.values()]
    return list(cast("list[Any]", value)) if isinstance(value, _CONTAINERS) else []
