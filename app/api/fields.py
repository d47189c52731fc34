"""Values of JSON: conversions, and error messages for invalid ones.

Knows: JSON types, ranges. Must not know: the fields of any dialect.
"""

from collections.abc import Iterable
from typing import Any, cast

import orjson

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
    if not isinstance(value, dict):
        raise invalid_request(path, f"{path} must be an object, not {quote_value(value)}")
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
