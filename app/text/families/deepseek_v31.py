"""DeepSeek V3.1's calls: JSON behind the name.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>

(without the line break). Source: the chat template of DeepSeek V3.1.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, Json, Spell
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
    def claims(self, template: str) -> bool:
        return CALLS in template and FENCE not in template

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            before=spell(CALLS),
            calls=tuple(
                f"{spell(f'{CALL}{tool.name}{SEPARATOR}')} {json(tool)} {spell(CALL_END)}"
                for tool in tools
            ),
            between="",
            after=spell(CALLS_END),
            trigger=CALLS,
        )
