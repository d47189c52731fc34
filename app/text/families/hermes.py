"""Hermes' calls, which Qwen and many others took over: JSON objects between tags.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Source: NousResearch's Hermes function calling, and the chat templates of Qwen 2.5 and Qwen 3.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_object import call_object, spell_object
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

# what others write between the same tags, or beside them
_NOT_OURS = ("<function=", "<arg_key>", "<use_mcp_tool>", "<tool_calls>")


class Family(ChatFamily):
    markers = (_OPEN, _CLOSE, "<think>", "</think>")

    def claims(self, template: str) -> bool:
        if _OPEN not in template or any(mark in template for mark in _NOT_OURS):
            return False
        # in a literal of Jinja's the quotation marks may be escaped
        return '{"name":' in template.replace('\\"', '"')

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(reader, pieces, tools, read=call_object, open=_OPEN, close=_CLOSE)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            calls=tuple(
                spell_object(tool, spell, json, before=f"{_OPEN}\n", after=f"\n{_CLOSE}")
                for tool in tools
            ),
            between=spell("\n"),
            trigger=_OPEN,
        )
