"""GigaChat 3.1 writes a tool call as a token, followed by a JSON object.

    <|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo"}}

Knows: the token. Must not know: the parser of JSON calls, other families.

Source: Sber's chat template of GigaChat 3.1, which supports one call per turn.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALL = "<|function_call|>"


class Family(MarkedFamily):
    call_markers = (_CALL,)
    markers = (_CALL,)

    def matches(self, template: str) -> bool:
        return _CALL in template and "<|message_sep|>" in template

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from parse_calls(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            calls=tuple(
                build_call_expression(tool, literal, json_schema, before=_CALL) for tool in tools
            ),
            trigger=_CALL,
        )
