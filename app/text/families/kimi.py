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
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_object import Outcome
from app.text.syntax.json_arguments import json_arguments
from app.text.syntax.marked_calls import marked_call
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

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
    interrupts = (_SECTION, _CALL)

    def claims(self, template: str) -> bool:
        return _CALL in template and _ARGUMENTS in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        marks = (_SECTION, _CALL) if tools else ()
        while (mark := (yield from reader.until(*marks, take=pieces.say))) is not None:
            read = _section if mark == _SECTION else _call
            yield from marked_call(reader, pieces, read=read, open=mark, close=_SECTION_END)

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


def _section(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    yield from reader.space()
    if (yield from reader.accept(_CALL)) is None:
        return "none"
    return (yield from _call(reader, pieces))


def _call(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    """What follows the marker that begins a call."""
    yield from reader.space()
    id = yield from reader.match(_ID)
    parts = _PARTS.fullmatch(id)
    reader.take(len(id))
    yield from reader.space()
    if parts is None or (yield from reader.accept(_ARGUMENTS)) is None:
        return "none"
    # an id that is not as the template would write it is replaced by one of ours
    whole = parts["full"] and parts["index"]
    pieces.call(parts["name"], id if whole else None)
    reader.release()
    yield from json_arguments(reader, pieces, _CALL_END, _CALL, _SECTION_END)
    yield from reader.accept(_CALL_END)
    return "whole"
