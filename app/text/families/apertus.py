"""Apertus' calls: a JSON array between tokens, in which each name is the key of its arguments.

    <|inner_prefix|>…<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}]<|tools_suffix|>

The model calls while it thinks, and may go on thinking behind a call.

Source: the chat template of Apertus 8B Instruct.
"""

import json as json_text
from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell, Tags
from app.text.syntax.call_list import call_list
from app.text.syntax.call_object import Outcome
from app.text.syntax.json_reader import json_string, json_value
from app.text.syntax.marked_calls import marked_call, marked_calls
from app.text.syntax.pieces import Pieces, Splitter
from app.text.syntax.reader import Reader, Wait

_CALLS, _CALLS_END = "<|tools_prefix|>", "<|tools_suffix|>"
_THOUGHT, _THOUGHT_END = "<|inner_prefix|>", "<|inner_suffix|>"


class Family(ChatFamily):
    markers = (_CALLS, _CALLS_END, _THOUGHT, _THOUGHT_END)

    def claims(self, template: str) -> bool:
        return _CALLS in template and _CALLS_END in template

    def tags(self, template: str) -> Tags | None:
        return Tags(open=_THOUGHT, close=_THOUGHT_END)

    def split(self, *, tools: Sequence[Tool], tags: Tags | None, opened: bool) -> Splitter:
        if tags is None:
            return super().split(tools=tools, tags=None, opened=False)

        def parse(reader: Reader, pieces: Pieces) -> Wait[None]:
            yield from _interleaved(reader, pieces, tools, tags, thinking=opened)

        return Splitter(parse)

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from marked_calls(reader, pieces, tools, read=_array, open=_CALLS, close=_CALLS_END)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            before=spell(f"{_CALLS}["),
            calls=tuple(
                f"{spell(f'{{{_quoted(tool.name)}: ')} {json(tool)} {spell('}')}" for tool in tools
            ),
            between=spell(", "),
            after=spell(f"]{_CALLS_END}"),
            trigger=_CALLS,
        )


def _interleaved(
    reader: Reader, pieces: Pieces, tools: Sequence[Tool], tags: Tags, *, thinking: bool
) -> Wait[None]:
    calls = (_CALLS,) if tools else ()
    while True:
        take = pieces.think if thinking else pieces.say
        tag = tags.close if thinking else tags.open
        mark = yield from reader.until(tag, *calls, take=take)
        if mark is None:
            return
        if mark == tag:
            pieces.mark()
            thinking = not thinking
            continue
        yield from marked_call(reader, pieces, open=mark, read=_array, close=_CALLS_END, take=take)


def _array(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    return (yield from call_list(reader, pieces, _keyed))


def _keyed(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    yield from reader.space()
    if (yield from reader.accept("{")) is None:
        return "none"
    name = yield from json_string(reader)
    yield from reader.space()
    if name is None or (yield from reader.accept(":")) is None:
        return "none"
    pieces.call(name)
    reader.release()
    end = yield from json_value(reader, lambda text, _: pieces.arguments(text))
    if end != "whole":
        return "broken"
    yield from reader.space()
    return "broken" if (yield from reader.accept("}")) is None else "whole"


def _quoted(text: str) -> str:
    return json_text.dumps(text, ensure_ascii=False)
