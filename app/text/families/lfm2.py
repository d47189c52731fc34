"""LFM2's calls: a Python list of them between tags, which LFM2.5 leaves out at times.

    <|tool_call_start|>[get_weather(city="Oslo"), add(a=1, b=2)]<|tool_call_end|>

Asked for it in words, the models write a JSON list there. Source: the chat templates of LFM2,
LFM2.5 and LFM2.5-VL, and Liquid AI's documentation of tool use.
"""

from collections.abc import Collection, Sequence

from app.core.requests import CalledTool, Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell, Tags
from app.text.syntax.call_list import call_list
from app.text.syntax.call_object import Outcome, call_object
from app.text.syntax.marked_calls import marked_call
from app.text.syntax.pieces import Pieces
from app.text.syntax.python_calls import python_list, python_syntax, written_call
from app.text.syntax.reader import Reader, Wait

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


class Family(ChatFamily):
    markers = (_OPEN, _CLOSE, "<think>", "</think>")

    def claims(self, template: str) -> bool:
        if "<|tool_list_start|>" in template or f"{_OPEN}[" in template:
            return True
        return "List of tools: [" in template and "keep_past_thinking" in template

    def tags(self, template: str) -> Tags | None:
        """Some reason whose templates say nothing of it."""
        return Tags(open="<think>", close="</think>")

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        marks = (_OPEN, "[") if tools else ()
        names = {tool.name for tool in tools}
        while (mark := (yield from reader.before(*marks, take=pieces.say))) is not None:
            if mark == "[":
                yield from _bare(reader, pieces, names)
            else:
                yield from reader.accept(_OPEN)
                yield from marked_call(reader, pieces, read=_list, open=_OPEN, close=_CLOSE)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return python_syntax(
            tools,
            spell,
            json,
            before=f"{_OPEN}[",
            between=", ",
            after=f"]{_CLOSE}",
            trigger=_OPEN,
        )

    def written(self, calls: Sequence[CalledTool]) -> str | None:
        return f"{_OPEN}[{', '.join(map(written_call, calls))}]{_CLOSE}"


def _list(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    start = reader.hold()
    outcome = yield from python_list(reader, pieces)
    if outcome == "none":
        reader.rewind(start)
        reader.hold()
        outcome = yield from call_list(reader, pieces, call_object)
    return outcome


def _bare(reader: Reader, pieces: Pieces, names: Collection[str]) -> Wait[None]:
    """A list without tags, or a bracket of the text. Only what names a tool is a call then."""
    start = reader.hold()
    outcome = yield from python_list(reader, pieces, names=names)
    if outcome == "none":
        reader.rewind(start)
        pieces.say(reader.take(1), start)
        return
    if outcome == "broken":
        yield from reader.until(take=lambda text, _: pieces.arguments(text))
    pieces.mark()
