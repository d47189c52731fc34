"""MiroThinker's calls: JSON between tags, beside the name and the server that the tool is on.

    <use_mcp_tool>
    <server_name>generic-extras</server_name>
    <tool_name>get_weather</tool_name>
    <arguments>
    {"city": "Oslo"}
    </arguments>
    </use_mcp_tool>

Source: MiroMind's chat template of MiroThinker, which makes up the server from the tool's name; so
it is not told here.
"""

import re
from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_object import Outcome
from app.text.syntax.json_arguments import json_arguments
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_OPEN, _CLOSE = "<use_mcp_tool>", "</use_mcp_tool>"
_SERVER, _SERVER_END = "<server_name>", "</server_name>"
_NAME, _NAME_END = "<tool_name>", "</tool_name>"
_ARGUMENTS, _ARGUMENTS_END = "<arguments>", "</arguments>"
_WORD = re.compile(r"[^\s<]+")


class Family(ChatFamily):
    markers = ("<think>", "</think>")

    def claims(self, template: str) -> bool:
        return _OPEN in template and _NAME in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(reader, pieces, tools, read=_calls, open=_OPEN, close=_CLOSE)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        server = f"{spell(f'{_SERVER}')} /[a-z_-]{{1,40}}/"
        end = spell(f"\n{_ARGUMENTS_END}\n")
        return CallSyntax(
            before=spell(f"{_OPEN}\n"),
            calls=tuple(
                f"{server} {spell(_begin(tool.name))} {json(tool)} {end}" for tool in tools
            ),
            between="",
            after=spell(_CLOSE),
            trigger=_OPEN,
        )


def _begin(name: str) -> str:
    return f"{_SERVER_END}\n{_NAME}{name}{_NAME_END}\n{_ARGUMENTS}\n"


def _calls(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    outcome = yield from _call(reader, pieces)
    while outcome == "whole":
        behind = reader.hold()
        outcome = yield from _call(reader, pieces)
        if outcome == "none":
            reader.rewind(behind)
            return "whole"
    return outcome


def _call(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    yield from _tagged(reader, _SERVER, _SERVER_END)
    name = yield from _tagged(reader, _NAME, _NAME_END)
    if not name:
        return "none"
    pieces.call(name)
    reader.release()
    yield from reader.space()
    yield from reader.accept(_ARGUMENTS)
    yield from json_arguments(reader, pieces, _ARGUMENTS_END, _CLOSE)
    yield from reader.accept(_ARGUMENTS_END)
    return "whole"


def _tagged(reader: Reader, open: str, close: str) -> Wait[str]:
    """The word between two tags; "" if there is none."""
    yield from reader.space()
    if (yield from reader.accept(open)) is None:
        return ""
    word = yield from reader.match(_WORD)
    reader.take(len(word))
    return "" if (yield from reader.accept(close)) is None else word
