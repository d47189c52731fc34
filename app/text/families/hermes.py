"""Hermes' calls, which Qwen and many others took over: JSON objects between tags.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Source: NousResearch's Hermes function calling, and the chat templates of Qwen 2.5 and Qwen 3.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.call_object import call_object
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.pieces import Pieces
from app.text.reader import Reader, Wait

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Family(ChatFamily):
    markers = (_OPEN, _CLOSE, "<think>", "</think>")

    def claims(self, template: str) -> bool:
        return _OPEN in template and '{"name":' in template and "<function=" not in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        marks = (_OPEN,) if tools else ()
        while (yield from reader.until(*marks, take=pieces.say)) is not None:
            inside = reader.hold()
            outcome = yield from call_object(reader, pieces)
            if outcome == "none":
                reader.rewind(inside)
                pieces.say(_OPEN, inside - len(_OPEN))
                continue
            reader.release()
            if outcome == "broken":
                yield from reader.until(_CLOSE, take=lambda text, _: pieces.arguments(text))
            else:
                yield from reader.space()
                yield from reader.accept(_CLOSE)
            pieces.mark()

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            calls=tuple(
                " ".join(
                    (
                        spell(f'{_OPEN}\n{{"name": "{tool.name}", "arguments": '),
                        json(tool),
                        spell(f"}}\n{_CLOSE}"),
                    )
                )
                for tool in tools
            ),
            between=spell("\n"),
            trigger=_OPEN,
        )
