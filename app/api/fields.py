"""Readers for the fields of a JSON object.

Knows: JSON types, ranges, error messages for invalid values. Must not know: the fields of any
dialect, the rule for unknown fields (unknown_fields.py).

A field that is null is treated as absent everywhere.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import orjson

from app.api.unknown_fields import check_unknown, report_unknown
from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.sampling_params import INT32_MAX, INT64_MAX, INT64_MIN

INT64 = (INT64_MIN, INT64_MAX)

# Integers up to this size can be converted to a float and back without loss.
_MAX_EXACT_INTEGER = 2**53

_MAX_ECHO_CHARS = 200


def invalid_request(param: str | None, message: str) -> AppError:
    return AppError(ErrorKind.INVALID, message, param=param or None)


def quote_value(value: object) -> str:
    """Formats a value for an error message. The result is short and omits the content of nested
    containers. Strings are marked as client text."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return mark_client_text(
                repr(value[:_MAX_ECHO_CHARS]) + ("…" if len(value) > _MAX_ECHO_CHARS else "")
            )
        case list():
            return "an array" if value else "an empty array"
        case dict():
            return "an object"
        case _:
            return str(value)


def unsupported_value(path: str, quoted: str, neutral: Iterable[object]) -> AppError:
    """Returns the error for a known but unsupported field. quoted: its value. neutral: the values
    that have no effect."""
    only = " or ".join(orjson.dumps(allowed).decode() for allowed in neutral)
    return invalid_request(path, f"{path} does not support {quoted}: leave it out, or use {only}")


def join_or(texts: Iterable[str]) -> str:
    """Joins alternatives: "a, b or c". There must be at least one."""
    *others, last = texts
    return f"{', '.join(others)} or {last}" if others else last


class Fields:
    """The fields of one JSON object. Read every known field, then call `check_unknown` for a body
    or an object of options, and `ignore_unknown` for an object that a client copies or stores: a
    message, a part, a tool, a call.

    Every reader method returns None for a field that is absent or null. For an invalid field, it
    raises AppError(INVALID) with the dotted path of the field.
    """

    def __init__(self, values: Mapping[str, object], at: str = "") -> None:
        self._values = values
        self._at = at
        self._known: set[str] = set()

    @staticmethod
    def from_value(value: object, at: str = "") -> "Fields":
        """Returns the fields of an object. Raises AppError(INVALID) if the value is not an
        object."""
        if not isinstance(value, dict):
            raise invalid_request(
                at, f"{at or 'the body'} must be an object, not {quote_value(value)}"
            )
        return Fields(cast("dict[str, object]", value), at)

    def path(self, name: str) -> str:
        return f"{self._at}.{name}" if self._at else name

    def check_unknown(self) -> None:
        """See `app.api.unknown_fields.check_unknown`."""
        check_unknown(self._iter_unknown(), self._known, self._at)

    def ignore_unknown(self, *accepted: str) -> None:
        """Reports the fields that were not read. accepted: names that are not reported."""
        report_unknown((name for name in self._iter_unknown() if name not in accepted), self._at)

    def _iter_unknown(self) -> Iterator[str]:
        for name, value in self._values.items():
            if name not in self._known and value is not None:
                yield name

    def reject(self, name: str, *neutral: object, instead: str = "leave it out") -> None:
        """Rejects a known but unsupported field, unless its value has no effect.

        neutral: values that have no effect. instead: the recommendation in the error message.
        """
        value = self.value(name)
        if value is None or any(json_equal(value, allowed) for allowed in neutral):
            return
        path = self.path(name)
        if not neutral:
            raise invalid_request(path, f"{path} is not supported: {instead}")
        raise unsupported_value(path, quote_value(value), neutral)

    def value(self, name: str) -> Any:
        self._known.add(name)
        return self._values.get(name)

    def required(self, name: str) -> Any:
        value = self.value(name)
        if value is None:
            path = self.path(name)
            raise invalid_request(path, f"{path} is missing")
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.value(name)
        if value is None or isinstance(value, bool):
            return value
        raise self._invalid_value(name, "true or false", value)

    def string(self, name: str) -> str | None:
        value = self.value(name)
        if value is None or isinstance(value, str):
            return value
        raise self._invalid_value(name, "a string", value)

    def required_string(self, name: str) -> str:
        self.required(name)
        value = self.string(name)
        assert value is not None
        return value

    def one_of(self, name: str, choices: Sequence[str]) -> str | None:
        """Reads a string that must be one of `choices`."""
        value = self.value(name)
        if value is None or value in choices:
            return value
        raise self._invalid_value(name, join_or(map(repr, choices)), value)

    def required_one_of(self, name: str, choices: Sequence[str]) -> str:
        self.required(name)
        word = self.one_of(name, choices)
        assert word is not None
        return word

    def number(self, name: str, low: float, high: float) -> float | None:
        """Reads a number from `low` to `high`, both inclusive."""
        value = self.value(name)
        if value is None:
            return None
        number = as_number(value)
        if number is None or not low <= number <= high:
            raise self._invalid_value(name, f"a number from {low:g} to {high:g}", value)
        return number

    def integer(self, name: str, low: int, high: int = INT64[1]) -> int | None:
        """Reads an integer from `low` to `high`, both inclusive. 3.0 is an integer, because JSON
        has only one number type."""
        value = self.value(name)
        if value is None:
            return None
        number = as_integer(value)
        if number is None or not low <= number <= high:
            raise self._invalid_value(name, describe_integer_range(low, high), value)
        return number

    def array(self, name: str) -> list[object] | None:
        value = self.value(name)
        array = as_array(value)
        if array is None and value is not None:
            raise self._invalid_value(name, "an array", value)
        return array

    def strings(self, name: str, max_items: int) -> tuple[str, ...]:
        """Reads a string or an array of strings. An array may contain at most `max_items` strings,
        and none may be empty. Returns () if the field is absent."""
        value = self.value(name)
        if value is None:
            return ()
        array = as_array(value)
        given = [value] if array is None else array
        path = self.path(name)
        if len(given) > max_items:
            raise invalid_request(
                path, f"{path} must contain at most {max_items} strings, not {len(given)}"
            )
        for item in given:
            if not isinstance(item, str) or not item:
                expected = "a string or an array of strings, none of them empty"
                raise invalid_request(path, f"{path} must be {expected}, not {quote_value(item)}")
        return tuple(cast("list[str]", given))

    def nested(self, name: str) -> "Fields | None":
        value = self.value(name)
        return None if value is None else Fields.from_value(value, self.path(name))

    def mapping(self, name: str) -> dict[str, Any] | None:
        """Reads an object with arbitrary keys. Its nesting depth is limited, so that recursion is
        safe."""
        value = self.value(name)
        return None if value is None else as_mapping(value, self.path(name))

    def items(self) -> Iterable[tuple[str, Any]]:
        """Yields all fields that are not null. Use it for objects with arbitrary keys."""
        self._known.update(self._values)
        return [(name, value) for name, value in self._values.items() if value is not None]

    def without(self, name: str) -> "Fields":
        """Returns the same object without one field. What is read from either counts as read from
        both."""
        rest = Fields({key: value for key, value in self._values.items() if key != name}, self._at)
        rest._known = self._known
        return rest

    def case_insensitive(self) -> "Fields":
        """Returns the same object with lower-case names. If two names differ only in case, the last
        non-null value is used."""
        return Fields({name.lower(): value for name, value in self.items()}, self._at)

    def _invalid_value(self, name: str, expected: str, value: object) -> AppError:
        path = self.path(name)
        return invalid_request(path, f"{path} must be {expected}, not {quote_value(value)}")


def drop_nulls(value: Any) -> Any:
    """Returns the JSON value without fields that are null."""
    match value:
        case dict():
            mapping = cast("dict[str, Any]", value)
            return {name: drop_nulls(one) for name, one in mapping.items() if one is not None}
        case list():
            return [drop_nulls(one) for one in cast("list[Any]", value)]
        case _:
            return value


def as_number(value: object) -> float | None:
    """Returns a finite JSON number or None. The parser rejects NaN and infinities."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def as_integer(value: object) -> int | None:
    """Returns an integer, or None for a value that is not an exact integer. The parser converts
    integers beyond 64 bits to floats, which also result in None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT_INTEGER:
        return int(value)
    return None


def as_array(value: object) -> list[object] | None:
    return cast("list[object]", value) if isinstance(value, list) else None


def as_mapping(value: object, path: str) -> dict[str, Any]:
    """Returns the object. Raises AppError(INVALID) if the value is not an object or is nested too
    deeply for recursion."""
    Fields.from_value(value, path)
    try:
        orjson.dumps(value)  # fails beyond 254 levels
    except orjson.JSONEncodeError as error:
        raise invalid_request(path, f"{path} is nested too deeply") from error
    return cast("dict[str, Any]", value)


def as_token_ids(values: list[object], path: str) -> tuple[int, ...]:
    """Returns token IDs, which are not yet checked against a vocabulary. Raises AppError(INVALID)
    for an invalid value."""
    # A prompt may have a million tokens. Valid IDs are checked in C; the loop runs only to find an
    # invalid one.
    if set(map(type, values)) == {int}:
        numbers = cast("list[int]", values)
        if min(numbers) >= 0 and max(numbers) <= INT32_MAX:
            return tuple(numbers)
    ids: list[int] = []
    for n, value in enumerate(values):
        id_ = as_integer(value)
        if id_ is None or not 0 <= id_ <= INT32_MAX:
            raise invalid_request(
                f"{path}.{n}", f"{path} must contain token IDs, not {quote_value(value)}"
            )
        ids.append(id_)
    return tuple(ids)


def describe_integer_range(low: int, high: int) -> str:
    if (low, high) == INT64:
        return "a 64-bit integer"
    if high == INT64[1]:
        return f"an integer of at least {low}"
    return f"an integer from {low} to {high}"


def json_equal(value: object, allowed: object) -> bool:
    """Returns whether two JSON values are equal. 1 and 1.0 are equal, but 1 and true are not."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
