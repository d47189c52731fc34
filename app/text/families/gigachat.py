"""GigaChat 3 writes a tool call as a JSON object in a separate turn. The model starts this turn
itself.

    <|message_sep|>

    function call<|role_sep|>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}

Knows: the tokens at the beginning of a turn. Must not know: the parser of JSON calls, other
families.

Source: Sber's chat template of GigaChat 3, which supports one call per turn.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_END_OF_TURN, _END_OF_ROLE = "<|message_sep|>", "<|role_sep|>"
_CALL_TURN = f"\n\nfunction call{_END_OF_ROLE}\n"


class Family(MarkedFamily):
    call_markers = (_END_OF_TURN,)
    markers = (_END_OF_TURN, _END_OF_ROLE)

    def matches(self, template: str) -> bool:
        ours = _END_OF_TURN in template and _END_OF_ROLE in template
        return ours and "<|function_call|>" not in template

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from _parse_call_turn(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        before = f"{_END_OF_TURN}{_CALL_TURN}"
        return ToolCallGrammar(
            calls=tuple(
                build_call_expression(tool, literal, json_schema, before=before) for tool in tools
            ),
            trigger=_END_OF_TURN,
        )


def _parse_call_turn(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    if (yield from reader.accept(_CALL_TURN)) is None:
        return "none"
    return (yield from parse_calls(reader, output))
