"""A parser for text with tool calls between markers. The closing marker is optional.

Knows: markers without a call, malformed calls. Must not know: the markers of any family, the syntax
of calls.
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
    """Parses the whole text. tools: the tools that may be called; if empty, the whole output is
    text. parse: the parser for the calls after `open`. close: the closing marker, if the syntax has
    one. other_opens: alternatives to `open`."""
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
    """Parses a call and `close`, after `open` was consumed. If no call follows, `open` is treated
    as text, and the following text is not consumed. ends: markers that also end a malformed call
    and are not consumed. on_text: receives the text; None adds it to the output."""
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
