"""Granite's calls: a JSON array behind a token of its own.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]

Where the model was told to reason, its answer stands between tags too: `<think>…</think>`, then
`<response>…</response>`.

Source: IBM's chat templates of Granite 3.0 to 3.3. What they write with `<tool_call>` instead of
the token is what Granite 3.1 does.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_list import call_list
from app.text.syntax.call_object import spell_object
from app.text.syntax.marked_calls import marked_call
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_CALLS, _CALLS_IN_LETTERS = "<|tool_call|>", "<tool_call>"
_RESPONSE, _RESPONSE_END = "<response>", "</response>"


class Family(ChatFamily):
    markers = (_CALLS,)

    def claims(self, template: str) -> bool:
        return _CALLS in template and "<|start_of_role|>" in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        calls = (_CALLS, _CALLS_IN_LETTERS) if tools else ()
        marks = calls
        if reader.at:  # behind reasoning
            yield from reader.space()
            if (yield from reader.accept(_RESPONSE)) is not None:
                pieces.mark()
                marks = (*calls, _RESPONSE_END)
        while (mark := (yield from reader.until(*marks, take=pieces.say))) is not None:
            if mark == _RESPONSE_END:
                pieces.mark()
            else:
                yield from marked_call(reader, pieces, open=mark, read=call_list, ends=calls)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            before=spell(f"{_CALLS}["),
            calls=tuple(spell_object(tool, spell, json) for tool in tools),
            between=spell(", "),
            after=spell("]"),
            trigger=_CALLS,
        )
