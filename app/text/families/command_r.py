"""Cohere's Command R and R+ of 2024 write a list of actions in a JSON code block.

    Action:
    ```json
    [
        {
            "tool_name": "get_weather",
            "parameters": {"city": "Oslo"}
        }
    ]
    ```

Knows: the code block around the actions. Must not know: the keys of an action (cohere.py), other
families.

Source: the tool use templates of these models.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.families.cohere import parse_actions
from app.text.syntax.json_calls import CallOutcome
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_OPEN, _FENCE = "Action:", "```"


class Family(MarkedFamily):
    call_markers = (_OPEN,)
    call_close = _FENCE

    def matches(self, template: str) -> bool:
        return '"tool_name": title of the tool' in template

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from _parse_block(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            before=literal(f"{_OPEN}\n{_FENCE}json\n[\n"),
            calls=tuple(
                " ".join(
                    (
                        literal(f'    {{\n        "tool_name": "{tool.name}",\n'),
                        literal('        "parameters": '),
                        json_schema(tool),
                        literal("\n    }"),
                    )
                )
                for tool in tools
            ),
            between=literal(",\n"),
            after=literal(f"\n]\n{_FENCE}"),
            trigger=f"{_OPEN}\n{_FENCE}json",
        )


def _parse_block(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    if (yield from reader.accept(_FENCE, f"{_FENCE}json")) is None:
        return "none"
    return (yield from parse_actions(reader, output))
