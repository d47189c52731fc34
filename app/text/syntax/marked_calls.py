"""Text in which calls stand behind a marker, and mostly before another one.

Knows: what becomes of a marker that no call follows, and of a call that goes wrong. Must not know:
any family's markers, nor how calls are written.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.syntax.call_list import ReadCall
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Take, Wait


def marked_calls(
    reader: Reader,
    pieces: Pieces,
    tools: Sequence[Tool],
    *,
    read: ReadCall,
    open: str,
    close: str | None = None,
    also: tuple[str, ...] = (),
) -> Wait[None]:
    """Read to the end of the text. tools: where there are none, all is text. read: what stands
    behind `open`. close: what stands behind that, where the syntax has such a marker. also: other
    markers that the same may stand behind."""
    opens = (open, *also)
    while mark := (yield from reader.until(*(opens if tools else ()), take=pieces.say)):
        yield from marked_call(reader, pieces, read=read, open=mark, close=close, ends=opens)


def marked_call(
    reader: Reader,
    pieces: Pieces,
    *,
    read: ReadCall,
    open: str,
    close: str | None = None,
    ends: tuple[str, ...] = (),
    take: Take | None = None,
) -> Wait[None]:
    """Read what stands behind `open`, which was just taken, and `close`. Where it is no call,
    `open` is text, and what follows is left to be read. ends: what else ends a broken call, and
    belongs to what follows. take: who gets the text; if nobody else, the answer."""
    inside = reader.hold()
    outcome = yield from read(reader, pieces)
    if outcome == "none":
        reader.rewind(inside)
        (take or pieces.say)(open, inside - len(open))
        return
    reader.release()
    closes = () if close is None else (close,)
    if outcome == "broken":
        yield from reader.before(*closes, *ends, take=lambda text, _: pieces.arguments(text))
    yield from reader.space()
    if closes:
        yield from reader.accept(*closes)
    pieces.mark()
