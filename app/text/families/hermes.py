"""Hermes, Qwen and many other models write tool calls as JSON objects between tags.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Knows: these tags. Must not know: the parser of JSON calls, the models that use these tags.

Source: NousResearch's Hermes function calling, and the chat templates of Qwen 2.5 and Qwen 3.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

# the markers of other families that use the same tags
_OTHER_FAMILY_MARKERS = ("<function=", "<arg_key>", "<use_mcp_tool>", "<tool_calls>")


class Family(MarkedFamily):
    call_markers = (_OPEN,)
    call_close = _CLOSE
    markers = (_OPEN, _CLOSE, "<think>", "</think>")

    def matches(self, template: str) -> bool:
        if _OPEN not in template or any(mark in template for mark in _OTHER_FAMILY_MARKERS):
            return False
        # quotation marks may be escaped in a Jinja literal
        return '{"name":' in template.replace('\\"', '"')

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from parse_calls(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            calls=tuple(
                build_call_expression(
                    tool, literal, json_schema, before=f"{_OPEN}\n", after=f"\n{_CLOSE}"
                )
                for tool in tools
            ),
            between=literal("\n"),
            trigger=_OPEN,
        )
