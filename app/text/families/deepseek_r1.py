"""DeepSeek R1's and V3's calls: JSON in a code block, behind the name.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Oslo"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Source: the chat templates of DeepSeek V3 and R1, those of its distillates, and Cogito's.
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
    FENCE_END,
    SEPARATOR,
    DeepSeekFamily,
)


class Family(DeepSeekFamily):
    def claims(self, template: str) -> bool:
        return CALLS in template and FENCE in template

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        begin, block = f"{CALL}function{SEPARATOR}", f"\n{FENCE}\n"
        end = spell(f"\n{FENCE_END}{CALL_END}")
        return CallSyntax(
            before=spell(CALLS),
            calls=tuple(f"{spell(begin + tool.name + block)} {json(tool)} {end}" for tool in tools),
            between=spell("\n"),
            after=spell(CALLS_END),
            trigger=CALLS,
        )
