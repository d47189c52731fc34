"""A parser of text with tool calls after a marker, usually closed by another marker.

Knows: how to handle a marker without a call, and a malformed call. Must not know: any family's
markers, the syntax of calls.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.syntax.json_calls import ParseCall
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import OnText, Reader, Resumable


def parse_marked_calls(
    reader: Reader,
    output: OutputBuilder,
    tools: Sequence[Tool],
    *,
    parse: ParseCall,
    open: str,
    close: str | None = None,
    other_opens: tuple[str, ...] = (),
) -> Resumable[None]:
    """Parses to the end of the text. tools: if empty, the whole output is text. parse: parses what
    follows `open`. close: the closing marker, if the syntax has one. other_opens: alternatives to
    `open`."""
    opens = (open, *other_opens)
    while mark := (
        yield from reader.read_until(*(opens if tools else ()), on_text=output.add_content)
    ):
        yield from parse_marked_call(
            reader, output, parse=parse, open=mark, close=close, ends=opens
        )


def parse_marked_call(
    reader: Reader,
    output: OutputBuilder,
    *,
    parse: ParseCall,
    open: str,
    close: str | None = None,
    ends: tuple[str, ...] = (),
    on_text: OnText | None = None,
) -> Resumable[None]:
    """Parses what follows `open`, which was just consumed, and `close`. If it is not a call, `open`
    is text, and what follows is not consumed. ends: markers that also end a malformed call, and are
    not consumed. on_text: receives text; None adds it to the output."""
    inside = reader.hold()
    outcome = yield from parse(reader, output)
    if outcome == "none":
        reader.rewind(inside)
        (on_text or output.add_content)(open, inside - len(open))
        return
    reader.release()
    closes = () if close is None else (close,)
    if outcome == "broken":
        yield from reader.read_before(
            *closes, *ends, on_text=lambda text, _: output.add_arguments(text)
        )
    yield from reader.skip_space()
    if closes:
        yield from reader.accept(*closes)
    output.add_marker()
