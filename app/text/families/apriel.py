"""Apriel writes its tool calls as a JSON array between tags. Its reasoning is delimited by fixed
sentences.

    Here are my reasoning steps:
    …
    [BEGIN FINAL RESPONSE]
    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>
    [END FINAL RESPONSE]

Knows: these tags and sentences. Must not know: the parser of JSON calls, other families.

Source: ServiceNow's chat templates of Apriel 1.5 and 1.6. Their system prompts describe the format.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALLS_END = "<tool_calls>", "</tool_calls>"
_STEPS = "Here are my reasoning steps:"
_FINAL, _FINAL_END = "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"


class Family(MarkedFamily):
    call_markers = (_CALLS,)
    call_close = _CALLS_END
    markers = (_CALLS, _CALLS_END, _FINAL, _FINAL_END)

    def matches(self, template: str) -> bool:
        return f"{_CALLS}[" in template and _FINAL in template

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        return ReasoningTags(open=_STEPS, close=_FINAL)

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        output.hide(_FINAL, _FINAL_END)
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
            after=literal(f"]{_CALLS_END}"),
            trigger=_CALLS,
        )
