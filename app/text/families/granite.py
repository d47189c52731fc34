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
from app.text.family import ChatFamily
from app.text.syntax.json_calls import build_call_expression, parse_call_list
from app.text.syntax.marked_calls import parse_marked_call
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALLS_IN_LETTERS = "<|tool_call|>", "<tool_call>"
_RESPONSE, _RESPONSE_END = "<response>", "</response>"


class Family(ChatFamily):
    markers = (_CALLS,)

    def matches(self, template: str) -> bool:
        return _CALLS in template and "<|start_of_role|>" in template

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        calls = (_CALLS, _CALLS_IN_LETTERS) if tools else ()
        marks = calls
        if reader.at:  # after reasoning
            yield from reader.skip_space()
            if (yield from reader.accept(_RESPONSE)) is not None:
                output.add_marker()
                marks = (*calls, _RESPONSE_END)
        while (
            mark := (yield from reader.read_until(*marks, on_text=output.add_content))
        ) is not None:
            if mark == _RESPONSE_END:
                output.add_marker()
            else:
                yield from parse_marked_call(
                    reader, output, open=mark, parse=parse_call_list, ends=calls
                )

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
