"""Text in which calls stand behind a marker, and mostly before another one.

Knows: what becomes of a marker that no call follows, and of a call that goes wrong. Must not know:
any family's markers, nor how calls are written.
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
    """Read to the end of the text. tools: where there are none, all is text. parse: what stands
    behind `open`. close: what stands behind that, where the syntax has such a marker. other_opens:
    other markers that the same may stand behind."""
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
    """Read what stands behind `open`, which was just taken, and `close`. Where it is no call,
    `open` is text, and what follows is left to be read. ends: what else ends a broken call, and
    belongs to what follows. on_text: who gets the text; if nobody else, the answer."""
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
