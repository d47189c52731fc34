"""Calls of Mistral's models since Devstral 2507: a name and JSON, each behind its token.

    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}

Source: mistral-common's tokenizer v13.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, Json, Spell
from app.text.syntax.mistral_calls import ARGUMENTS, CALL_ID, CALLS, MistralFamily


class Family(MistralFamily):
    def claims(self, template: str) -> bool:
        return CALLS in template and ARGUMENTS in template and CALL_ID not in template

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            calls=tuple(
                f"{spell(f'{CALLS}{tool.name}{ARGUMENTS}')} {json(tool)}" for tool in tools
            ),
            between="",
            trigger=CALLS,
        )
