"""Firefunction writes its tool calls as a keyword, followed by a JSON array.

     functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]

Knows: the keyword. Must not know: the parser of JSON calls, other families.

Source: Fireworks' chat template of Firefunction v2.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.family import ChatFamily
from app.text.syntax.json_calls import build_call_expression, parse_call_list
from app.text.syntax.marked_calls import parse_marked_calls
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS = "functools"


class Family(ChatFamily):
    def matches(self, template: str) -> bool:
        return f" {_CALLS}[" in template

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        yield from parse_marked_calls(reader, output, tools, parse=parse_call_list, open=_CALLS)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            before=literal(f" {_CALLS}["),
            calls=tuple(build_call_expression(tool, literal, json_schema) for tool in tools),
            between=literal(", "),
            after=literal("]"),
            trigger=f" {_CALLS}[",
        )
