"""Tool calls written as one JSON array, `[{…}, {…}]`, as it is being written.

Knows: brackets and commas. Must not know: what stands around the array.
"""

from collections.abc import Callable

from app.text.syntax.call_object import CallOutcome, parse_call_object
from app.text.syntax.pieces import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

ParseCall = Callable[[Reader, OutputBuilder], Resumable[CallOutcome]]
"""Reads a call, or several; as `parse_call_object`."""


def parse_call_list(
    reader: Reader, output: OutputBuilder, parse: ParseCall = parse_call_object
) -> Resumable[CallOutcome]:
    """Read such an array, white space before it skipped; else as `parse_call_object`. What follows
    a whole call and is neither another one nor the end of the array is not taken."""
    yield from reader.skip_space()
    if (yield from reader.accept("[")) is None:
        return "none"
    outcome = yield from parse(reader, output)
    while outcome == "whole":
        behind = reader.hold()
        yield from reader.skip_space()
        if (yield from reader.accept("]")) is not None:
            reader.release()
            return "whole"
        more = (yield from reader.accept(",")) is not None
        outcome = (yield from parse(reader, output)) if more else "none"
        if outcome == "none":
            reader.rewind(behind)
            return "whole"
    return outcome
