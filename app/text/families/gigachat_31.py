"""GigaChat 3.1's calls: a JSON object behind a token of its own.

    <|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo"}}

Source: Sber's chat template of GigaChat 3.1, which knows one call a turn.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_object import call_object, spell_object
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_CALL = "<|function_call|>"


class Family(ChatFamily):
    markers = (_CALL,)

    def claims(self, template: str) -> bool:
        return _CALL in template and "<|message_sep|>" in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(reader, pieces, tools, read=call_object, open=_CALL)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            calls=tuple(spell_object(tool, spell, json, before=_CALL) for tool in tools),
            trigger=_CALL,
        )
