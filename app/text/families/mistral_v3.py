"""Calls of Mistral's models up to Small 3.1: a JSON array.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "…"}]

Source: mistral-common's tokenizers v3 and v7. The id may be missing; what stands there is not told,
see `mistral_calls.py`. Before the array there is a space where the tokenizer is SentencePiece's.
"""

import json as jsons
from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, Json, Spell
from app.text.syntax.mistral_calls import ARGUMENTS, CALLS, ID_PATTERN, MistralFamily


class Family(MistralFamily):
    def claims(self, template: str) -> bool:
        return CALLS in template and ARGUMENTS not in template

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        before_id, behind_id = spell(', "id": "'), spell('"')
        id = f"({before_id} /{ID_PATTERN}/ {behind_id})?"
        return CallSyntax(
            before=f"{spell(CALLS)} ({spell(' ')})? {spell('[')}",
            calls=tuple(
                f"{spell(_begin(tool.name))} {json(tool)} {id} {spell('}')}" for tool in tools
            ),
            between=spell(", "),
            after=spell("]"),
            trigger=CALLS,
        )


def _begin(name: str) -> str:
    return f'{{"name": {jsons.dumps(name, ensure_ascii=False)}, "arguments": '
