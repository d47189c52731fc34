"""DeepSeek V3.1 writes a tool call as the function's name, followed by JSON.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>

The output has no line break. Source: the chat template of DeepSeek V3.1.

Knows: the tokens around a call. Must not know: the parser of the calls
(`app/text/syntax/deepseek_calls.py`).
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.deepseek_calls import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    FENCE,
    SEPARATOR,
    DeepSeekFamily,
)


class Family(DeepSeekFamily):
    def matches(self, template: str) -> bool:
        return CALLS in template and FENCE not in template

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            before=literal(CALLS),
            calls=tuple(
                f"{literal(f'{CALL}{tool.name}{SEPARATOR}')} {json_schema(tool)} "
                f"{literal(CALL_END)}"
                for tool in tools
            ),
            between="",
            after=literal(CALLS_END),
            trigger=CALLS,
        )
