"""What DeepSeek's models up to V3.1 share: calls between tokens of their own.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>…<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Knows: how both ways to write one are read. Must not know: which template wants which.

    get_weather<｜tool▁sep｜>{"city": "Oslo"}

    function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Oslo"}
    ```

Source: the chat templates of DeepSeek V3, R1 and V3.1.
"""

import re
from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import ChatFamily
from app.text.syntax.call_object import Outcome
from app.text.syntax.json_arguments import json_arguments
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"

_WORD = re.compile(r"[^\s<{`]+")


class DeepSeekFamily(ChatFamily):
    markers = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END, "<think>", "</think>")

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(
            reader, pieces, tools, read=_call, open=CALLS, close=CALLS_END, also=(CALL,)
        )


def _call(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    """One call and its end. Those of a group begin with the same token."""
    yield from reader.space()
    yield from reader.accept(CALL)
    name = yield from _word(reader)
    if (yield from reader.accept(SEPARATOR)) is None:
        return "none"
    # what stood before was a kind of call if a name follows
    name = (yield from _word(reader)) or name
    if not name:
        return "none"
    pieces.call(name)
    reader.release()
    yield from reader.space()
    fenced = (yield from reader.accept(FENCE, FENCE_END)) is not None
    ends = (CALL_END, CALLS_END, CALL)
    met = yield from json_arguments(reader, pieces, *((FENCE_END, *ends) if fenced else ends))
    if met == FENCE_END:
        yield from reader.accept(FENCE_END)
        yield from reader.space()
    yield from reader.accept(CALL_END)
    return "whole"


def _word(reader: Reader) -> Wait[str]:
    word = yield from reader.match(_WORD)
    return reader.take(len(word))
