"""The rule for fields that the server does not know, in every dialect.

Knows: the names that a request has and the names that its endpoint knows. Must not know: dialects,
how bodies are parsed, how a response reports the fields.

A field that the server knows is honored, or rejected by name where its value would change the
response. A field that it does not know is ignored and reported, in the request's context
(app/core/request_context.py). Two names are errors: one that differs from the name of a known
option by one edit, because it is probably misspelled, and with `--strict-fields`, every unknown
name at the top of a body.
"""

from collections.abc import Collection, Iterable

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.request_context import REQUEST_CONTEXT

_MAX_ECHO_CHARS = 200

# The number of unknown fields of an object that are compared with the known ones.
_MAX_COMPARED = 64


def report_unknown(names: Iterable[str], at: str = "") -> None:
    """Reports fields that are ignored. at: the path of their object."""
    context = REQUEST_CONTEXT.get()
    if context is not None:
        for name in names:
            context.report_ignored_field(f"{at}.{name}" if at else name)


def check_unknown(names: Iterable[str], known: Collection[str], at: str = "") -> None:
    """Checks the unknown fields of a body or of an object of options, and reports those that are
    ignored. at: the path of the object; "" for the body. Raises AppError(INVALID)."""
    context = REQUEST_CONTEXT.get()
    strict = context is not None and context.strict_fields and not at
    for place, name in enumerate(names):
        path = f"{at}.{name[:_MAX_ECHO_CHARS]}" if at else name[:_MAX_ECHO_CHARS]
        shown = mark_client_text(repr(path))
        meant = find_misspelled(name, known) if place < _MAX_COMPARED else None
        if meant is not None:
            raise AppError(
                ErrorKind.INVALID, f"unknown field {shown}: did you mean {meant!r}?", param=path
            )
        if strict:
            raise AppError(
                ErrorKind.INVALID,
                f"unknown field {shown}: leave it out, or start the server without --strict-fields",
                param=path,
            )
        report_unknown((name,), at)


def find_misspelled(name: str, known: Collection[str]) -> str | None:
    """Returns the known name that differs from `name` by one edit, or None. Known names of one
    letter are not considered, because every other letter differs from them by one edit."""
    near = (one for one in known if len(one) > 1 and is_one_edit(name, one))
    return min(near, default=None)


def is_one_edit(a: str, b: str) -> bool:
    """Returns whether two different texts differ by one insertion, deletion or replacement of a
    character, or by two adjacent characters in exchanged order. Takes linear time."""
    short, long = sorted((a, b), key=len)
    if len(long) - len(short) > 1 or a == b:
        return False
    at = next(
        (n for n, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]), -1
    )
    if at < 0:
        return True  # the longer text has one more character at its end
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    swapped = short[at : at + 2] == long[at : at + 2][::-1] and short[at + 2 :] == long[at + 2 :]
    return swapped or short[at + 1 :] == long[at + 1 :]
