"""Jamba writes its tool calls as a JSON array between tags, with one object per line.

    <tool_calls>[
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    ]</tool_calls>

Knows: these tags. Must not know: the parser of JSON calls, other families.

Source: AI21's chat template of Jamba 1.6.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALLS_END = "<tool_calls>", "</tool_calls>"


class Family(MarkedFamily):
    call_markers = (_CALLS,)
    call_close = _CALLS_END
    markers = (_CALLS, _CALLS_END)

    def matches(self, template: str) -> bool:
        return _CALLS in template and "<tool_definitions>" in template

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from parse_calls(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            before=literal(f"{_CALLS}[\n"),
            calls=tuple(build_call_expression(tool, literal, json_schema) for tool in tools),
            between=literal(",\n"),
            after=literal(f"\n]{_CALLS_END}"),
            trigger=_CALLS,
        )
