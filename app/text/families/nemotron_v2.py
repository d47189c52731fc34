"""Nemotron Nano 2 writes its tool calls as a JSON array between tags.

    <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>

Knows: these tags. Must not know: the parser of JSON calls, other families.

Source: NVIDIA's chat templates of Nemotron Nano 2. The templates of Llama Nemotron use the same
syntax.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALLS_END = "<TOOLCALL>", "</TOOLCALL>"


class Family(MarkedFamily):
    call_markers = (_CALLS,)
    call_close = _CALLS_END
    markers = (_CALLS, _CALLS_END, "<think>", "</think>")

    def matches(self, template: str) -> bool:
        return _CALLS in template

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from parse_calls(reader, output))

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
