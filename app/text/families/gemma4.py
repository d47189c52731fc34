"""Gemma 4: calls in a notation of its own, and thoughts in a channel, which may come at any place.

    <|channel>thought
    I think…<channel|><|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_response>

Source: the chat template of Gemma 4, and Google's documentation of its prompt format.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell, Tags
from app.text.syntax.gemma_calls import GemmaCalls
from app.text.syntax.gemma_rules import gemma_syntax
from app.text.syntax.marked_calls import marked_call
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CHANNEL, _CHANNEL_END = "<|channel>", "<channel|>"
_LABEL = "thought"

# where the results are to come: the end of the answer, mostly
_RESPONSE = "<|tool_response>"


class Family(ChatFamily):
    markers = (_OPEN, _CLOSE, _QUOTE, _CHANNEL, _CHANNEL_END)

    def claims(self, template: str) -> bool:
        return f"{_OPEN}call:" in template

    def tags(self, template: str) -> Tags | None:
        if _CHANNEL not in template:
            return None
        return Tags(open=f"{_CHANNEL}{_LABEL}\n", close=_CHANNEL_END)

    def opened(self, prompt: str, tags: Tags) -> bool:
        return prompt.endswith((tags.open, tags.open.rstrip()))

    def reasoning(self, reader: Reader, pieces: Pieces, tags: Tags, *, opened: bool) -> Wait[None]:
        """Only what the prompt began; all else is in channels, which come at any place."""
        if opened:
            pieces.mark()
            yield from _thoughts(reader, pieces)

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        calls = GemmaCalls(quote=_QUOTE, close=_CLOSE, tools=tools)
        # an end without a beginning says nothing: the models write one now and then
        marks = (_CHANNEL, _CHANNEL_END, *((_OPEN, _CLOSE, _RESPONSE) if tools else ()))
        while (mark := (yield from reader.until(*marks, take=pieces.say))) is not None:
            if mark == _OPEN:
                yield from marked_call(reader, pieces, read=calls.read, open=_OPEN, close=_CLOSE)
                continue
            pieces.mark()
            if mark == _CHANNEL:
                yield from _label(reader)
                yield from _thoughts(reader, pieces)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return gemma_syntax(tools, spell, json, open=_OPEN, close=_CLOSE, quote=_QUOTE)


def _thoughts(reader: Reader, pieces: Pieces) -> Wait[None]:
    """To the end of the channel. All channels hold thoughts."""
    mark = yield from reader.until(_CHANNEL, _CHANNEL_END, take=pieces.think)
    while mark == _CHANNEL:
        pieces.mark()
        yield from _label(reader)
        mark = yield from reader.until(_CHANNEL, _CHANNEL_END, take=pieces.think)
    if mark is not None:
        pieces.mark()


def _label(reader: Reader) -> Wait[None]:
    """What names the channel, behind its beginning, is no part of the thoughts."""
    start = reader.hold()
    yield from reader.space()
    labelled = (yield from reader.accept(_LABEL)) is not None
    character = yield from reader.peek()
    if not labelled or not (character.isspace() or character in ("", "<")):
        reader.rewind(start)
    reader.release()
