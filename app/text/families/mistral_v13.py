"""Mistral's models since Devstral 2507 write a tool call as a name and JSON, each after a token.

    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}

Knows: the order of the tokens. Must not know: the parser of the calls
(`app/text/syntax/mistral_calls.py`).

Source: mistral-common's tokenizer v13.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.mistral_calls import ARGUMENTS, CALL_ID, CALLS, MistralFamily


class Family(MistralFamily):
    def matches(self, template: str) -> bool:
        return CALLS in template and ARGUMENTS in template and CALL_ID not in template

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            calls=tuple(
                f"{literal(f'{CALLS}{tool.name}{ARGUMENTS}')} {json_schema(tool)}" for tool in tools
            ),
            between="",
            trigger=CALLS,
        )
