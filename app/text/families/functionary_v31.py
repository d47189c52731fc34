"""Functionary 3.1's calls, which Llama 3.1 has for functions of one's own: JSON in a tag that is
named after the function.

    <function=get_weather>{"city": "Oslo"}</function>

Behind the token `<|python_tag|>` stand the arguments of a function called python.

Source: MeetKai's chat template of Functionary medium v3.1.
"""

import re
from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_object import Outcome
from app.text.syntax.json_arguments import json_arguments
from app.text.syntax.json_reader import json_value
from app.text.syntax.marked_calls import marked_call
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_OPEN, _CLOSE = "<function=", "</function>"
_PYTHON = "<|python_tag|>"
_NAME = re.compile(r"[^\s<>{]+")


class Family(ChatFamily):
    markers = (_PYTHON,)

    def claims(self, template: str) -> bool:
        return f'{_OPEN}example_function_name>{{"' in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        marks = (_OPEN, _PYTHON) if tools else ()
        while mark := (yield from reader.until(*marks, take=pieces.say)):
            read = _python if mark == _PYTHON else _tagged
            yield from marked_call(reader, pieces, read=read, open=mark, ends=marks)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            calls=tuple(
                f"{spell(f'{_OPEN}{tool.name}>')} {json(tool)} {spell(_CLOSE)}" for tool in tools
            ),
            between="",
            trigger=_OPEN,
        )


def _tagged(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    name = yield from reader.match(_NAME)
    reader.take(len(name))
    if not name or (yield from reader.accept(">")) is None:
        return "none"
    pieces.call(name)
    reader.release()
    yield from json_arguments(reader, pieces, _CLOSE, _OPEN, _PYTHON)
    yield from reader.accept(_CLOSE)
    return "whole"


def _python(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        return "none"
    pieces.call("python")
    reader.release()
    end = yield from json_value(reader, lambda text, _: pieces.arguments(text))
    return "whole" if end == "whole" else "broken"
