"""Limits the time and output size of rendering a chat template.

Knows: the names and signatures of Python's methods and Jinja's filters. Must not know: templates.

Some operations, such as `'x' * 10**10`, can produce far more output than input. Their cost is
estimated before they run. For other operations, the output is about as large as the input, and is
counted afterwards. All operations share one budget, so a template cannot avoid the limit by
splitting its work into many steps.

The cost estimate of a function has the same signature as the function, with the budget as an
additional first argument. It returns the maximum number of characters or elements that the function
produces, or raises the same errors as the budget. The output of functions that are not in these
tables is at most a few times larger than their input.
"""

import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, cast

from app.core.thread_pools import CancelToken

_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)

# the number of visited values between two checks of the clock
_CLOCK_CHECK_INTERVAL = 1024

# the cost of a list element, in characters
ELEMENT_CHARACTERS = 8

# the cost of a number, a bracket with a comma, and similar tokens, in characters
_SCALAR_CHARACTERS = 4


class RenderCostLimit:
    """The remaining budget of one render. characters: the maximum total output size of all
    operations, as counted by `measure`. cancel_token: cancelled when the render is no longer
    needed."""

    def __init__(
        self, *, seconds: float, characters: int, cancel_token: CancelToken | None = None
    ) -> None:
        self._cancel_token = cancel_token or CancelToken()
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._max_characters = self._remaining = characters

    def check_time(self) -> None:
        """Raises TimeoutError after the time limit, and WorkCancelled when the token is
        cancelled."""
        self._cancel_token.check()
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"rendering takes longer than {self._seconds:g} seconds")

    def check_size(self, count: int) -> None:
        """Raises MemoryError if `count` characters exceed the remaining budget."""
        if count > self._remaining:
            raise MemoryError(f"rendering produces more than {self._max_characters} characters")

    def charge(self, value: object) -> None:
        """Counts a produced value. Raises the same errors as `check_size`."""
        count = shallow_size(value)
        self.check_size(count)
        self._remaining -= count

    def iterate(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items. Checks the clock before each item."""
        for item in items:
            self.check_time()
            yield item

    def join(self, parts: Iterable[str]) -> str:
        """Joins strings. The size is counted before the result is created."""
        pieces: list[str] = []
        total = 0
        for piece in parts:
            pieces.append(piece)
            total += len(piece)
            self.check_size(total)
        self._remaining -= total
        return "".join(pieces)

    def measure(self, value: object) -> int:
        """Estimates the number of characters of `value` as text. An element that occurs several
        times is counted each time. Stops early by raising the same errors as `check_size` and
        `check_time`."""
        if isinstance(value, str | bytes):
            return len(value)
        total, num_items = 0, 0
        todo: list[Any] = [value]
        while todo:
            item = todo.pop()
            num_items += 1
            if num_items % _CLOCK_CHECK_INTERVAL == 0:
                self.check_time()
            total += len(item) if isinstance(item, str | bytes) else _SCALAR_CHARACTERS
            inner = _children(item)
            # check before the list of values to visit grows
            self.check_size(total + len(todo) + len(inner))
            todo += inner
        return total


def shallow_size(value: object) -> int:
    """Returns the cost of a value in characters, excluding its elements."""
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


CostEstimate = Callable[..., int]

# The maximum number of bits of an integer. It is larger than any hash, but arithmetic is still
# cheap.
_MAX_INTEGER_BITS = 1 << 16

_UNBOUNDED = 1 << 63

# a conversion of the % operator, with its width and precision
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?")

_DIGITS = re.compile(r"\d+")


def estimate_multiply(limit: RenderCostLimit, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _integer_size(left.bit_length() + right.bit_length())
    if isinstance(left, int):
        left, right = right, left
    return shallow_size(left) * max(right, 0) if isinstance(right, int) else 0


def estimate_power(limit: RenderCostLimit, left: Any, right: Any) -> int:
    integers = isinstance(left, int) and isinstance(right, int)
    return _integer_size(left.bit_length() * right) if integers else 0


def estimate_add(limit: RenderCostLimit, left: Any, right: Any) -> int:
    return shallow_size(left) + shallow_size(right)


def estimate_percent_format(limit: RenderCostLimit, form: Any, given: Any) -> int:
    """Estimates `form % given`. Raises ValueError if a width is given as an argument."""
    if not isinstance(form, str):
        return 0
    total = len(form) + form.count("%") * limit.measure(given)
    for width, precision in _CONVERSION.findall(form):
        if "*" in (width, precision):
            raise ValueError("a format must not use * as a width: write a number")
        total += _parse_width(width) + _parse_width(precision)
    return total


def estimate_format_field(limit: RenderCostLimit, value: Any, spec: str) -> int:
    """Estimates `format(value, spec)`."""
    return limit.measure(value) + sum(map(_parse_width, _DIGITS.findall(spec)))


def _integer_size(count: int) -> int:
    return 0 if count <= _MAX_INTEGER_BITS else _UNBOUNDED


def _parse_width(digits: str) -> int:
    """Parses a width. Python rejects numbers with thousands of digits."""
    return int(digits or 0) if len(digits) < 19 else _UNBOUNDED


def _estimate_padding(limit: RenderCostLimit, text: Any, width: int = 80, *_: Any) -> int:
    return width


def _estimate_replace(
    limit: RenderCostLimit, text: Any, old: Any, new: Any, *_: Any, **__: Any
) -> int:
    if not isinstance(text, str | bytes):
        text = "".join(limit.iterate(str(text)))
    return len(text) + text.count(old) * len(new)


def _estimate_translate(limit: RenderCostLimit, text: str, table: Mapping[int, Any]) -> int:
    longest = max((len(to) for to in table.values() if isinstance(to, str)), default=1)
    return len(text) * max(longest, 1)


def _estimate_indent(
    limit: RenderCostLimit,
    text: Any,
    width: int | str = 4,
    first: bool = False,
    blank: bool = False,
) -> int:
    lines = len(text.splitlines()) + 1 if isinstance(text, str) else limit.measure(text)
    return lines * (len(width) if isinstance(width, str) else width)


def _estimate_round(
    limit: RenderCostLimit, value: Any, precision: int = 0, method: str = "common"
) -> int:
    return 0 if abs(precision) <= _MAX_INTEGER_BITS // 4 else _UNBOUNDED


def _estimate_text(limit: RenderCostLimit, value: Any, *_: Any, **__: Any) -> int:
    return limit.measure(value)


def _estimate_expandtabs(limit: RenderCostLimit, text: Any, tabsize: int = 8) -> int:
    return len(text) * max(tabsize, 1)


def _estimate_to_bytes(
    limit: RenderCostLimit, number: int, length: int = 1, *_: Any, **__: Any
) -> int:
    return length


def _estimate_batch(
    limit: RenderCostLimit, value: Any, linecount: int, fill_with: Any = None
) -> int:
    return ELEMENT_CHARACTERS * linecount


def _estimate_slice(limit: RenderCostLimit, value: Any, slices: int, fill_with: Any = None) -> int:
    return ELEMENT_CHARACTERS * slices


def _estimate_format(limit: RenderCostLimit, form: Any, *given: Any, **named: Any) -> int:
    return estimate_percent_format(limit, form, given or named)


OPERATORS: Mapping[str, CostEstimate] = {
    "*": estimate_multiply,
    "**": estimate_power,
    "+": estimate_add,
    "%": estimate_percent_format,
}

# methods of texts, bytes and numbers
METHODS: Mapping[str, CostEstimate] = {
    "center": _estimate_padding,
    "expandtabs": _estimate_expandtabs,
    "ljust": _estimate_padding,
    "replace": _estimate_replace,
    "rjust": _estimate_padding,
    "to_bytes": _estimate_to_bytes,
    "translate": _estimate_translate,
    "zfill": _estimate_padding,
}

# these filters convert their whole input to text
_TEXT_FILTERS = (
    *("capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "striptags", "sum"),
    *("title", "trim", "truncate", "upper", "urlencode", "wordcount"),
)

FILTERS: Mapping[str, CostEstimate] = {
    **dict.fromkeys(_TEXT_FILTERS, _estimate_text),
    "batch": _estimate_batch,
    "center": _estimate_padding,
    "format": _estimate_format,
    "indent": _estimate_indent,
    "replace": _estimate_replace,
    "round": _estimate_round,
    "slice": _estimate_slice,
}
