"""Text in which calls stand behind a marker, and mostly before another one.

Knows: what becomes of a marker that no call follows, and of a call that goes wrong. Must not know:
any family's markers, nor how calls are written.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.call_list import ReadCall
from app.text.pieces import Pieces
from app.text.reader import Reader, Wait


def marked_calls(
    reader: Reader,
    pieces: Pieces,
    tools: Sequence[Tool],
    *,
    read: ReadCall,
    open: str,
    close: str | None = None,
) -> Wait[None]:
    """Read to the end of the text. tools: where there are none, all is text. read: what stands
    behind `open`. close: where a broken call ends; None for a syntax that ends calls by ending."""
    marks = (open,) if tools else ()
    while (yield from reader.until(*marks, take=pieces.say)) is not None:
        yield from marked_call(reader, pieces, read=read, open=open, close=close)


def marked_call(
    reader: Reader, pieces: Pieces, *, read: ReadCall, open: str, close: str | None = None
) -> Wait[None]:
    """Read what stands behind `open`, which was just taken, and `close`. Where it is no call,
    `open` is text, and what follows is left to be read."""
    inside = reader.hold()
    outcome = yield from read(reader, pieces)
    if outcome == "none":
        reader.rewind(inside)
        pieces.say(open, inside - len(open))
        return
    reader.release()
    if outcome == "broken":
        ends = () if close is None else (close,)
        yield from reader.until(*ends, take=lambda text, _: pieces.arguments(text))
    elif close is not None:
        yield from reader.space()
        yield from reader.accept(close)
    pieces.mark()
