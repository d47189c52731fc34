"""How much the functions make that make much of little.

Knows: Python's methods and Jinja's filters by name and signature. Must not know: templates.

An estimate is called as the function would be, behind the budget that it is for, and says how many
characters or elements come out at most; or raises as the budget does. What is not in these tables
makes at most a few times of what it is given.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from app.text.budget import ELEMENT, Budget, size

Estimate = Callable[..., int]

# of a whole number, in bits: more than any hash, and nothing to compute with
_LONGEST_NUMBER = 1 << 16

_HUGE = 1 << 63

# a conversion of the % operator: its width and its precision
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?")

_DIGITS = re.compile(r"\d+")


def times(budget: Budget, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _bits(left.bit_length() + right.bit_length())
    if isinstance(left, int):
        left, right = right, left
    return size(left) * max(right, 0) if isinstance(right, int) else 0


def power(budget: Budget, left: Any, right: Any) -> int:
    whole = isinstance(left, int) and isinstance(right, int)
    return _bits(left.bit_length() * right) if whole else 0


def plus(budget: Budget, left: Any, right: Any) -> int:
    return size(left) + size(right)


def percent(budget: Budget, form: Any, given: Any) -> int:
    """Raises ValueError for a width that is not written in the format."""
    if not isinstance(form, str):
        return 0
    total = len(form) + form.count("%") * budget.weigh(given)
    for width, precision in _CONVERSION.findall(form):
        if "*" in (width, precision):
            raise ValueError("* as a width in a format is not supported: write a number")
        total += _number(width) + _number(precision)
    return total


def field(budget: Budget, value: Any, spec: str) -> int:
    """Of `format(value, spec)`."""
    return budget.weigh(value) + sum(map(_number, _DIGITS.findall(spec)))


def _bits(count: int) -> int:
    return 0 if count <= _LONGEST_NUMBER else _HUGE


def _number(digits: str) -> int:
    """Python reads no number of thousands of digits."""
    return int(digits or 0) if len(digits) < 19 else _HUGE


def _padded(budget: Budget, text: Any, width: int = 80, *_: Any) -> int:
    return width


def _replaced(budget: Budget, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    if not isinstance(text, str | bytes):
        text = "".join(budget.pace(str(text)))
    return len(text) + text.count(old) * len(new)


def _translated(budget: Budget, text: str, table: Mapping[int, Any]) -> int:
    longest = max((len(to) for to in table.values() if isinstance(to, str)), default=1)
    return len(text) * max(longest, 1)


def _indented(
    budget: Budget, text: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> int:
    lines = len(text.splitlines()) + 1 if isinstance(text, str) else budget.weigh(text)
    return lines * (len(width) if isinstance(width, str) else width)


def _rounded(budget: Budget, value: Any, precision: int = 0, method: str = "common") -> int:
    return 0 if abs(precision) <= _LONGEST_NUMBER // 4 else _HUGE


def _written(budget: Budget, value: Any, *_: Any, **__: Any) -> int:
    return budget.weigh(value)


def _expanded(budget: Budget, text: Any, tabsize: int = 8) -> int:
    return len(text) * max(tabsize, 1)


def _number_bytes(budget: Budget, number: int, length: int = 1, *_: Any, **__: Any) -> int:
    return length


def _batches(budget: Budget, value: Any, linecount: int, fill_with: Any = None) -> int:
    return ELEMENT * linecount


def _slices(budget: Budget, value: Any, slices: int, fill_with: Any = None) -> int:
    return ELEMENT * slices


def _formatted(budget: Budget, form: Any, *given: Any, **named: Any) -> int:
    return percent(budget, form, given or named)


OPERATORS: Mapping[str, Estimate] = {"*": times, "**": power, "+": plus, "%": percent}

# of texts, bytes and numbers
METHODS: Mapping[str, Estimate] = {
    "center": _padded,
    "expandtabs": _expanded,
    "ljust": _padded,
    "replace": _replaced,
    "rjust": _padded,
    "to_bytes": _number_bytes,
    "translate": _translated,
    "zfill": _padded,
}

# what these are given becomes text as a whole, whatever it is
_WRITING = (
    *("capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "striptags", "sum"),
    *("title", "trim", "truncate", "upper", "urlencode", "wordcount"),
)

FILTERS: Mapping[str, Estimate] = {
    **dict.fromkeys(_WRITING, _written),
    "batch": _batches,
    "center": _padded,
    "format": _formatted,
    "indent": _indented,
    "replace": _replaced,
    "round": _rounded,
    "slice": _slices,
}
