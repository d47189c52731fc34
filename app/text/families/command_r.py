"""Cohere's Command R and R+ of 2024: a list of actions in a block of JSON.

    Action:
    ```json
    [
        {
            "tool_name": "get_weather",
            "parameters": {"city": "Oslo"}
        }
    ]
    ```

Source: the tool use templates of these models.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.families.cohere import read_actions
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_object import Outcome
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_OPEN, _FENCE = "Action:", "```"


class Family(ChatFamily):
    def claims(self, template: str) -> bool:
        return '"tool_name": title of the tool' in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(reader, pieces, tools, read=_block, open=_OPEN, close=_FENCE)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            before=spell(f"{_OPEN}\n{_FENCE}json\n[\n"),
            calls=tuple(
                " ".join(
                    (
                        spell(f'    {{\n        "tool_name": "{tool.name}",\n'),
                        spell('        "parameters": '),
                        json(tool),
                        spell("\n    }"),
                    )
                )
                for tool in tools
            ),
            between=spell(",\n"),
            after=spell(f"\n]\n{_FENCE}"),
            trigger=f"{_OPEN}\n{_FENCE}json",
        )


def _block(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    yield from reader.space()
    if (yield from reader.accept(_FENCE, f"{_FENCE}json")) is None:
        return "none"
    return (yield from read_actions(reader, pieces))
