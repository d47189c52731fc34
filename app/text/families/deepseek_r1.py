"""DeepSeek R1's and V3's tool calls: the name, then JSON in a code block.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Oslo"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Source: the chat templates of DeepSeek V3 and R1, those of its distillates, and Cogito's.
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
    FENCE_END,
    SEPARATOR,
    DeepSeekFamily,
)


class Family(DeepSeekFamily):
    def matches(self, template: str) -> bool:
        return CALLS in template and FENCE in template

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        begin, block = f"{CALL}function{SEPARATOR}", f"\n{FENCE}\n"
        end = literal(f"\n{FENCE_END}{CALL_END}")
        return ToolCallGrammar(
            before=literal(CALLS),
            calls=tuple(
                f"{literal(begin + tool.name + block)} {json_schema(tool)} {end}" for tool in tools
            ),
            between=literal("\n"),
            after=literal(CALLS_END),
            trigger=CALLS,
        )
