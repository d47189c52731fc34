"""Firefunction's calls: a JSON array behind a word.

     functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]

Source: Fireworks' chat template of Firefunction v2.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_list import call_list
from app.text.syntax.call_object import spell_object
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_CALLS = "functools"


class Family(ChatFamily):
    def claims(self, template: str) -> bool:
        return f" {_CALLS}[" in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(reader, pieces, tools, read=call_list, open=_CALLS)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            before=spell(f" {_CALLS}["),
            calls=tuple(spell_object(tool, spell, json) for tool in tools),
            between=spell(", "),
            after=spell("]"),
            trigger=f" {_CALLS}[",
        )
