"""Apriel's calls: a JSON array between tags. Its reasoning stands between sentences.

    Here are my reasoning steps:
    …
    [BEGIN FINAL RESPONSE]
    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>
    [END FINAL RESPONSE]

Source: ServiceNow's chat templates of Apriel 1.5 and 1.6, whose system prompts ask for it.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell, Tags
from app.text.syntax.call_list import call_list
from app.text.syntax.call_object import spell_object
from app.text.syntax.marked_calls import marked_call
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_CALLS, _CALLS_END = "<tool_calls>", "</tool_calls>"
_STEPS = "Here are my reasoning steps:"
_FINAL, _FINAL_END = "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"


class Family(ChatFamily):
    markers = (_CALLS, _CALLS_END, _FINAL, _FINAL_END)

    def claims(self, template: str) -> bool:
        return f"{_CALLS}[" in template and _FINAL in template

    def tags(self, template: str) -> Tags | None:
        return Tags(open=_STEPS, close=_FINAL)

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        marks = (_FINAL_END, _CALLS) if tools else (_FINAL_END,)
        while (mark := (yield from reader.until(*marks, take=pieces.say))) is not None:
            if mark == _FINAL_END:
                pieces.mark()
            else:
                yield from marked_call(reader, pieces, open=mark, read=call_list, close=_CALLS_END)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            before=spell(f"{_CALLS}["),
            calls=tuple(spell_object(tool, spell, json) for tool in tools),
            between=spell(", "),
            after=spell(f"]{_CALLS_END}"),
            trigger=_CALLS,
        )
