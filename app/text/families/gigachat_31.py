"""GigaChat 3.1 writes a tool call as a token, followed by a JSON object.

    <|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo"}}

Knows: the token. Must not know: the parser of JSON calls, other families.

Source: Sber's chat template of GigaChat 3.1, which supports one call per turn.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.family import ChatFamily
from app.text.syntax.json_calls import build_call_expression, parse_call_object
from app.text.syntax.marked_calls import parse_marked_calls
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALL = "<|function_call|>"


class Family(ChatFamily):
    markers = (_CALL,)

    def matches(self, template: str) -> bool:
        return _CALL in template and "<|message_sep|>" in template

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        yield from parse_marked_calls(reader, output, tools, parse=parse_call_object, open=_CALL)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            calls=tuple(
                build_call_expression(tool, literal, json_schema, before=_CALL) for tool in tools
            ),
            trigger=_CALL,
        )
