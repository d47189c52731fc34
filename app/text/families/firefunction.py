"""Firefunction writes its tool calls as a keyword, followed by a JSON array.

     functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]

Knows: the keyword. Must not know: the parser of JSON calls, other families.

Source: Fireworks' chat template of Firefunction v2.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS = "functools"


class Family(MarkedFamily):
    call_markers = (_CALLS,)

    def matches(self, template: str) -> bool:
        return f" {_CALLS}[" in template

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from parse_calls(reader, output))

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
