"""Nemotron Nano 2 writes its tool calls as a JSON array between tags.

    <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>

Knows: these tags. Must not know: the parser of JSON calls, other families.

Source: NVIDIA's chat templates of Nemotron Nano 2. The templates of Llama Nemotron use the same
syntax.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.family import ChatFamily
from app.text.syntax.json_calls import build_call_expression, parse_call_list
from app.text.syntax.marked_calls import parse_marked_calls
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALLS_END = "<TOOLCALL>", "</TOOLCALL>"


class Family(ChatFamily):
    markers = (_CALLS, _CALLS_END, "<think>", "</think>")

    def matches(self, template: str) -> bool:
        return _CALLS in template

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        yield from parse_marked_calls(
            reader, output, tools, parse=parse_call_list, open=_CALLS, close=_CALLS_END
        )

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            before=literal(f"{_CALLS}["),
            calls=tuple(build_call_expression(tool, literal, json_schema) for tool in tools),
            between=literal(", "),
            after=literal(f"]{_CALLS_END}"),
            trigger=_CALLS,
        )
