"""GigaChat 3's calls: a JSON object in a turn of its own, which the model goes on to by itself.

    <|message_sep|>

    function call<|role_sep|>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}

Source: Sber's chat template of GigaChat 3, which knows one call a turn.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_object import Outcome, call_object, spell_object
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_END_OF_TURN, _END_OF_ROLE = "<|message_sep|>", "<|role_sep|>"
_CALL_TURN = f"\n\nfunction call{_END_OF_ROLE}\n"


class Family(ChatFamily):
    markers = (_END_OF_TURN, _END_OF_ROLE)

    def claims(self, template: str) -> bool:
        ours = _END_OF_TURN in template and _END_OF_ROLE in template
        return ours and "<|function_call|>" not in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(reader, pieces, tools, read=_turn, open=_END_OF_TURN)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        before = f"{_END_OF_TURN}{_CALL_TURN}"
        return CallSyntax(
            calls=tuple(spell_object(tool, spell, json, before=before) for tool in tools),
            trigger=_END_OF_TURN,
        )


def _turn(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    if (yield from reader.accept(_CALL_TURN)) is None:
        return "none"
    return (yield from call_object(reader, pieces))
