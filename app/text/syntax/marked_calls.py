"""The base class of families with tool calls between markers. The closing marker is optional.

Knows: markers without a call, malformed calls. Must not know: the markers of any family, the syntax
of calls.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import ChatFamily
from app.text.syntax.json_calls import CallOutcome, ParseCall
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import OnText, Reader, Resumable


class MarkedFamily(ChatFamily):
    """call_close: the marker after the calls, if the syntax has one."""

    call_close: str | None = None

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        """Parses the calls after a marker. Returns the same values as `parse_call_object`."""
        raise NotImplementedError

    def parse_call(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        mark: str,
        on_text: OnText,
    ) -> Resumable[bool]:
        called = yield from parse_marked_call(
            reader,
            output,
            parse=lambda reader, output: self.parse_marked(reader, output, tools),
            open=mark,
            close=self.call_close,
            ends=self.call_markers,
            on_text=on_text,
        )
        if called and self.call_close in self.markers:
            output.hide(self.call_close)  # it may come too late
        return called


def parse_marked_call(
    reader: Reader,
    output: OutputBuilder,
    *,
    parse: ParseCall,
    open: str,
    close: str | None = None,
    ends: tuple[str, ...] = (),
    on_text: OnText | None = None,
) -> Resumable[bool]:
    """Parses a call and `close`, after `open` was consumed. Returns whether there was a call. If
    not, `open` is treated as text, and the following text is not consumed. ends: markers that also
    end a malformed call and are not consumed. on_text: receives the text; None adds it to the
    output."""
    inside = reader.hold()
    closes = () if close is None else (close,)
    reader.call_ends = (*closes, *ends)
    outcome = yield from parse(reader, output)
    if outcome == "none":
        reader.rewind(inside)
        (on_text or output.add_content)(open, inside - len(open))
        return False
    reader.release()
    if outcome == "broken":
        yield from reader.read_before(
            *closes, *ends, on_text=lambda text, _: output.add_arguments(text)
        )
    output.add_marker()
    behind = reader.hold()
    yield from reader.skip_space()
    if closes and (yield from reader.accept(*closes)) is not None:
        reader.release()
        output.add_marker()
    else:
        reader.rewind(behind)
    return True
