"""Kimi's calls: JSON behind an id that holds the name, between tokens of their own.

    <|tool_calls_section_begin|>
    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
    <|tool_call_end|>
    <|tool_calls_section_end|>

(without the line breaks). Source: the chat templates of Kimi K2 and K2 Thinking, and the tool call
guidance in MoonshotAI's repository Kimi-K2.
"""

import re
from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell, Tags
from app.text.json_arguments import json_arguments
from app.text.pieces import Pieces
from app.text.reader import Reader, Wait

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_ID = re.compile(r"[^\s<]+")
_PARTS = re.compile(r"(?P<full>functions\.)?(?P<name>.+?)(?P<index>:[0-9]+)?")


class Family(ChatFamily):
    markers = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END, "<think>", "</think>")

    def claims(self, template: str) -> bool:
        return _CALL in template and _ARGUMENTS in template

    def reasoning(self, reader: Reader, pieces: Pieces, tags: Tags, *, opened: bool) -> Wait[None]:
        """The model sometimes goes from thinking to calls without closing the one."""
        start = reader.hold()
        yield from reader.space()
        again = (yield from reader.accept(tags.open)) is not None
        if not again:
            reader.rewind(start)
            if not opened:
                return
        reader.release()
        pieces.mark()
        yield from reader.before(tags.close, _SECTION, _CALL, take=pieces.think)
        if (yield from reader.accept(tags.close)) is not None:
            pieces.mark()

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        marks = (_SECTION, _CALL) if tools else ()
        while (mark := (yield from reader.until(*marks, take=pieces.say))) is not None:
            inside = reader.hold()
            if mark == _SECTION:
                yield from reader.space()
            if mark == _SECTION and (yield from reader.accept(_CALL)) is None:
                begun = False
            else:
                begun = yield from _call(reader, pieces)
            if not begun:
                reader.rewind(inside)
                pieces.say(mark, inside - len(mark))
                continue
            yield from reader.space()
            yield from reader.accept(_SECTION_END)
            pieces.mark()

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            before=spell(_SECTION),
            calls=tuple(
                " ".join(
                    (
                        spell(f"{_CALL}functions.{tool.name}:"),
                        "/[0-9]{1,3}/",
                        spell(_ARGUMENTS),
                        json(tool),
                        spell(_CALL_END),
                    )
                )
                for tool in tools
            ),
            between="",
            after=spell(_SECTION_END),
            trigger=_SECTION,
        )


def _call(reader: Reader, pieces: Pieces) -> Wait[bool]:
    """What follows the marker that begins a call. Whether one was begun."""
    yield from reader.space()
    id = yield from reader.match(_ID)
    parts = _PARTS.fullmatch(id)
    reader.take(len(id))
    yield from reader.space()
    if parts is None or (yield from reader.accept(_ARGUMENTS)) is None:
        return False
    # an id that is not as the template would write it is replaced by one of ours
    whole = parts["full"] and parts["index"]
    pieces.call(parts["name"], id if whole else None)
    reader.release()
    yield from json_arguments(reader, pieces, _CALL_END, _CALL, _SECTION_END)
    yield from reader.accept(_CALL_END)
    return True
