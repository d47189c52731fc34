"""Nemotron Nano 2's calls: a JSON array between tags.

    <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>

Source: NVIDIA's chat templates of Nemotron Nano 2; those of Llama Nemotron write the same.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_list import call_list
from app.text.syntax.call_object import spell_object
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_CALLS, _CALLS_END = "<TOOLCALL>", "</TOOLCALL>"


class Family(ChatFamily):
    markers = (_CALLS, _CALLS_END, "<think>", "</think>")

    def claims(self, template: str) -> bool:
        return _CALLS in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(
            reader, pieces, tools, read=call_list, open=_CALLS, close=_CALLS_END
        )

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            before=spell(f"{_CALLS}["),
            calls=tuple(spell_object(tool, spell, json) for tool in tools),
            between=spell(", "),
            after=spell(f"]{_CALLS_END}"),
            trigger=_CALLS,
        )
