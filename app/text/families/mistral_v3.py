"""Calls of Mistral's models up to Small 3.1: a JSON array.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "…"}]

Source: mistral-common's tokenizers v3 and v7. The id, which may stand there, is left to us.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, Json, Spell
from app.text.syntax.call_object import spell_object
from app.text.syntax.mistral_calls import ARGUMENTS, CALLS, MistralFamily


class Family(MistralFamily):
    def claims(self, template: str) -> bool:
        return CALLS in template and ARGUMENTS not in template

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            before=spell(f"{CALLS}["),
            calls=tuple(spell_object(tool, spell, json) for tool in tools),
            between=spell(", "),
            after=spell("]"),
            trigger=CALLS,
        )
