"""Tool calls written as one JSON array, `[{…}, {…}]`, as it is being written.

Knows: brackets and commas. Must not know: what stands around the array.
"""

from collections.abc import Callable

from app.text.syntax.call_object import Outcome, call_object
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

ReadCall = Callable[[Reader, Pieces], Wait[Outcome]]
"""Reads a call, or several; as `call_object`."""


def call_list(reader: Reader, pieces: Pieces, read: ReadCall = call_object) -> Wait[Outcome]:
    """Read such an array, white space before it skipped; else as `call_object`. What follows a
    whole call and is neither another one nor the end of the array is not taken."""
    yield from reader.space()
    if (yield from reader.accept("[")) is None:
        return "none"
    outcome = yield from read(reader, pieces)
    while outcome == "whole":
        behind = reader.hold()
        yield from reader.space()
        if (yield from reader.accept("]")) is not None:
            reader.release()
            return "whole"
        more = (yield from reader.accept(",")) is not None
        outcome = (yield from read(reader, pieces)) if more else "none"
        if outcome == "none":
            reader.rewind(behind)
            return "whole"
    return outcome
