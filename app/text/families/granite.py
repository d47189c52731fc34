"""Granite writes its tool calls as a token, followed by a JSON array.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]

If reasoning is enabled, the response is between tags too: `<think>…</think>` is followed by
`<response>…</response>`.

Knows: the token of each version. Must not know: the parser of JSON calls, other families.

Source: IBM's chat templates of Granite 3.0 to 3.3. Granite 3.1 writes `<tool_call>` instead of the
token.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALLS_IN_LETTERS = "<|tool_call|>", "<tool_call>"
_RESPONSE, _RESPONSE_END = "<response>", "</response>"


class Family(MarkedFamily):
    call_markers = (_CALLS, _CALLS_IN_LETTERS)
    markers = (_CALLS,)

    def matches(self, template: str) -> bool:
        return _CALLS in template and "<|start_of_role|>" in template

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        if reader.at:  # after reasoning
            yield from reader.skip_space()
            if (yield from reader.accept(_RESPONSE)) is not None:
                output.add_marker()
                output.hide(_RESPONSE_END)
        yield from super().parse_tool_calls(reader, output, tools)

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
            after=literal("]"),
            trigger=_CALLS,
        )
