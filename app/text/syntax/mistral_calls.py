"""What all of Mistral's models share, whichever way they write their calls.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "…"}]
    [TOOL_CALLS]get_weather[CALL_ID]…[ARGS]{"city": "Oslo"}
    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}

Knows: how each is read, since a model that was trained on one sometimes writes another; reasoning,
which may stand anywhere; what ids must be. Must not know: which template wants which.

Source: mistral-common's tokenizers v3, v11 and v13, and Mistral's chat templates. An id that stands
behind the arguments is not used: the call has been given out by then.
"""

import re
import secrets
import string
from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import ChatFamily, Tags
from app.text.syntax.call_list import call_list
from app.text.syntax.call_object import Outcome
from app.text.syntax.json_reader import json_value
from app.text.syntax.marked_calls import marked_call
from app.text.syntax.pieces import Pieces, Splitter
from app.text.syntax.reader import Reader, Wait

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINK, THINK_END = "[THINK]", "[/THINK]"

# what templates insist on: nine letters or digits
ID_PATTERN = "[a-zA-Z0-9]{9}"

_WORD = re.compile(r"[^\s\[\]{}\"]+")
_LETTERS = string.ascii_letters + string.digits


class MistralFamily(ChatFamily):
    markers = (CALLS, CALL_ID, ARGUMENTS, THINK, THINK_END)

    def tags(self, template: str) -> Tags | None:
        if THINK in template:
            return Tags(open=THINK, close=THINK_END)
        return super().tags(template)

    def call_id(self, call: int) -> str | None:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def split(self, *, tools: Sequence[Tool], tags: Tags | None, opened: bool) -> Splitter:
        def parse(reader: Reader, pieces: Pieces) -> Wait[None]:
            if tags is not None:
                yield from self.reasoning(reader, pieces, tags, opened=opened)
            yield from _interleaved(reader, pieces, tools, tags)

        return Splitter(parse)


def _interleaved(
    reader: Reader, pieces: Pieces, tools: Sequence[Tool], tags: Tags | None
) -> Wait[None]:
    """Text, calls and reasoning in any order; what looks like a call in reasoning is none."""
    calls = (CALLS,) if tools else ()
    marks = calls if tags is None else (*calls, tags.open)
    while (mark := (yield from reader.until(*marks, take=pieces.say))) is not None:
        if tags is None or mark == CALLS:
            yield from marked_call(reader, pieces, read=_calls, open=mark, ends=marks)
            continue
        pieces.mark()
        if (yield from reader.until(tags.close, take=pieces.think)) is not None:
            pieces.mark()


def _calls(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    yield from reader.space()
    if (yield from reader.peek()) == "[":
        return (yield from call_list(reader, pieces))
    name = yield from _word(reader)
    id = None
    if (yield from reader.accept(CALL_ID)) is not None:
        id = yield from _word(reader)
    # where the token is not shown the braces tell
    begins = (yield from reader.accept(ARGUMENTS)) is not None
    if not name or not (begins or (yield from reader.peek()) == "{"):
        return "none"
    pieces.call(name, id or None)
    reader.release()
    end = yield from json_value(reader, lambda text, _: pieces.arguments(text))
    return "whole" if end == "whole" else "broken"


def _word(reader: Reader) -> Wait[str]:
    word = yield from reader.match(_WORD)
    return reader.take(len(word))
