"""OLMo 3's calls: Python between tags, a call a line.

    <function_calls>get_weather(city="Oslo")
    add(a=1, b=2)</function_calls>

Source: Ai2's chat templates of OLMo 3 Instruct and Think.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.python_calls import python_calls, python_syntax
from app.text.syntax.reader import Reader, Wait

_OPEN, _CLOSE = "<function_calls>", "</function_calls>"


class Family(ChatFamily):
    markers = (_OPEN, _CLOSE, "<think>", "</think>")

    def claims(self, template: str) -> bool:
        return _OPEN in template and "<functions>" in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(reader, pieces, tools, read=python_calls, open=_OPEN, close=_CLOSE)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return python_syntax(
            tools, spell, json, before=_OPEN, between="\n", after=_CLOSE, trigger=_OPEN
        )
