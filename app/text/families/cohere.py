"""Cohere's Command R7B and Command A: every part of an answer between tokens of its own.

    <|START_THINKING|>I think…<|END_THINKING|>
    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}
    ]<|END_ACTION|>
    <|START_RESPONSE|>It rains.<|END_RESPONSE|>

(without the line breaks between the parts). Source: the chat templates of these models.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell, Tags
from app.text.syntax.call_list import call_list
from app.text.syntax.call_object import Outcome, call_object
from app.text.syntax.marked_calls import marked_call
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_THINKING, _THINKING_END = "<|START_THINKING|>", "<|END_THINKING|>"
_ACTION, _ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"


class Family(ChatFamily):
    lead = "<|START_RESPONSE|>"
    tail = "<|END_RESPONSE|>"
    markers = (_THINKING, _THINKING_END, _ACTION, _ACTION_END, lead, tail)

    def claims(self, template: str) -> bool:
        return _ACTION in template and self.lead in template

    def tags(self, template: str) -> Tags | None:
        return Tags(open=_THINKING, close=_THINKING_END)

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        marks = (self.lead, self.tail, _THINKING, *((_ACTION,) if tools else ()))
        while (mark := (yield from reader.until(*marks, take=pieces.say))) is not None:
            if mark == _ACTION:
                yield from marked_call(
                    reader, pieces, read=read_actions, open=_ACTION, close=_ACTION_END
                )
                continue
            pieces.mark()
            if mark == _THINKING:
                yield from reader.until(_THINKING_END, take=pieces.think)
                pieces.mark()

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            before=spell(f"{_ACTION}[\n    "),
            calls=tuple(
                " ".join(
                    (
                        spell('{"tool_call_id": "'),
                        "/[0-9]{1,3}/",
                        spell(f'", "tool_name": "{tool.name}", "parameters": '),
                        json(tool),
                        spell("}"),
                    )
                )
                for tool in tools
            ),
            between=spell(",\n    "),
            after=spell(f"\n]{_ACTION_END}"),
            trigger=_ACTION,
        )


def read_actions(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    """A list of calls, with the keys that Cohere gives their parts."""
    return (yield from call_list(reader, pieces, _action))


def _action(reader: Reader, pieces: Pieces) -> Wait[Outcome]:
    return (
        yield from call_object(
            reader,
            pieces,
            name_keys=("tool_name", "name"),
            argument_keys=("parameters", "arguments"),
            id_keys=("tool_call_id",),
        )
    )
