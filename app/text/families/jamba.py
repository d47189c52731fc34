"""Jamba's calls: a JSON array between tags, an object a line.

    <tool_calls>[
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    ]</tool_calls>

Source: AI21's chat template of Jamba 1.6.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_list import call_list
from app.text.syntax.call_object import spell_object
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_CALLS, _CALLS_END = "<tool_calls>", "</tool_calls>"


class Family(ChatFamily):
    markers = (_CALLS, _CALLS_END)

    def claims(self, template: str) -> bool:
        return _CALLS in template and "<tool_definitions>" in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(
            reader, pieces, tools, read=call_list, open=_CALLS, close=_CALLS_END
        )

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            before=spell(f"{_CALLS}[\n"),
            calls=tuple(spell_object(tool, spell, json) for tool in tools),
            between=spell(",\n"),
            after=spell(f"\n]{_CALLS_END}"),
            trigger=_CALLS,
        )
