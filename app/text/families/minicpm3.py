"""MiniCPM3's calls: a block of Python between tags, behind its thoughts.

    <|thought_start|>
    I should look.
    <|thought_end|>
    <|tool_call_start|>
    ```python
    get_weather(city="Oslo")
    ```
    <|tool_call_end|>

Source: the chat template of MiniCPM3-4B.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell, Tags
from app.text.syntax.call_object import Outcome
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.python_calls import python_calls, python_syntax
from app.text.syntax.reader import Reader, Wait

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_THOUGHT, _THOUGHT_END = "<|thought_start|>", "<|thought_end|>"
_FENCE = "```"


class Family(ChatFamily):
    markers = (_OPEN, _CLOSE, _THOUGHT, _THOUGHT_END)

    def claims(self, template: str) -> bool:
        return _OPEN in template and _THOUGHT in template

    def tags(self, template: str) -> Tags | None:
        return Tags(open=_THOUGHT, close=_THOUGHT_END)

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(reader, pieces, tools, read=_block, open=_OPEN, close=_CLOSE)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return python_syntax(
            tools,
            spell,
            json,
            before=f"{_OPEN}\n{_FENCE}python\n",
            between="\n",
            after=f"\n{_FENCE}\n{_CLOSE}",
            trigger=_OPEN,
        )


def _block(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    yield from reader.space()
    yield from reader.accept(f"{_FENCE}python", _FENCE)
    outcome = yield from python_calls(reader, pieces)
    if outcome == "whole":
        yield from reader.space()
        yield from reader.accept(_FENCE)
    return outcome
