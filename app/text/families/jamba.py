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
from app.text.family import ChatFamily
from app.text.syntax.json_calls import build_call_expression, parse_call_list
from app.text.syntax.marked_calls import parse_marked_calls
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALLS_END = "<tool_calls>", "</tool_calls>"


class Family(ChatFamily):
    markers = (_CALLS, _CALLS_END)

    def matches(self, template: str) -> bool:
        return _CALLS in template and "<tool_definitions>" in template

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
            before=literal(f"{_CALLS}[\n"),
            calls=tuple(build_call_expression(tool, literal, json_schema) for tool in tools),
            between=literal(",\n"),
            after=literal(f"\n]{_CALLS_END}"),
            trigger=_CALLS,
        )
