"""Mistral's models up to Small 3.1 write their tool calls as a JSON array.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "…"}]

Knows: the keys of a call. Must not know: the parser of the calls
(`app/text/syntax/mistral_calls.py`).

Source: mistral-common's tokenizers v3 and v7. The ID may be missing. It is ignored, for the reason
in `mistral_calls.py`. SentencePiece tokenizers put a space before the array.
"""

import json as jsons
from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.mistral_calls import ARGUMENTS, CALLS, ID_PATTERN, MistralFamily


class Family(MistralFamily):
    def matches(self, template: str) -> bool:
        return CALLS in template and ARGUMENTS not in template

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        before_id, behind_id = literal(', "id": "'), literal('"')
        id = f"({before_id} /{ID_PATTERN}/ {behind_id})?"
        return ToolCallGrammar(
            before=f"{literal(CALLS)} ({literal(' ')})? {literal('[')}",
            calls=tuple(
                f"{literal(_build_call_prefix(tool.name))} {json_schema(tool)} {id} {literal('}')}"
                for tool in tools
            ),
            between=literal(", "),
            after=literal("]"),
            trigger=CALLS,
        )


def _build_call_prefix(name: str) -> str:
    return f'{{"name": {jsons.dumps(name, ensure_ascii=False)}, "arguments": '
