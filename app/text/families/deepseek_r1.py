"""DeepSeek R1 and V3 write a tool call as the function's name, followed by JSON in a code block.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Oslo"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Knows: these tokens, the code block. Must not know: the parser of the calls
(`app/text/syntax/deepseek_calls.py`).

Source: the chat templates of DeepSeek V3 and R1, of R1's distilled models, and of Cogito.
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
