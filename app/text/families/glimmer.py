"""Muse Glimmer's ATEM: messages with a recipient each, of which one answer holds several.

     to=self<|message|>I think…<|eom|>
    <|start|>assistant to=get_weather<|message|><atem:function_calls>
    <atem:invoke name="get_weather">
    <atem:parameter name="city">Oslo</atem:parameter>
    </atem:invoke>
    </atem:function_calls>

What goes to "self" is reasoning, what goes to a tool holds calls, the rest is for the user. The
prompt ends with `<|start|>assistant`; `<|eot|>` ends the answer, so it is mostly not in its text.

Source: the model's chat template.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from app.core.requests import Tool
from app.text.family import CallSyntax, Json, Spell, Tags
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait
from app.text.syntax.tagged_call import CallTags, TaggedCalls
from app.text.syntax.tagged_family import TaggedFamily

_TAGS = CallTags(
    before="<atem:function_calls>",
    after="</atem:function_calls>",
    begin='<atem:invoke name="',
    name_end='">',
    end="</atem:invoke>",
    key_begin='<atem:parameter name="',
    key_ends={'">': None},
    value_end="</atem:parameter>",
)
_START, _MESSAGE, _NEXT = "<|start|>", "<|message|>", "<|eom|>"
_ENDS = (_NEXT, "<|eot|>")
_ASSISTANT = f"{_START}assistant"
_THINK = Tags(open=f" to=self{_MESSAGE}", close=_NEXT)
_RECIPIENT = re.compile(r"[^\s<]{1,256}")


class Family(TaggedFamily):
    call_tags = _TAGS
    markers = (_START, _MESSAGE, *_ENDS, _TAGS.before, _TAGS.after)
    lead = f" to=user{_MESSAGE}"
    # the first message was begun by the prompt
    restart = _ASSISTANT

    def claims(self, template: str) -> bool:
        return _TAGS.before in template

    def tags(self, template: str) -> Tags | None:
        return _THINK

    def reasoning(self, reader: Reader, pieces: Pieces, tags: Tags, *, opened: bool) -> Wait[None]:
        """Only what the prompt began: all other reasoning is a message of its own."""
        if opened:
            pieces.mark()
            yield from reader.before(_START, *_ENDS, take=pieces.think)

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        calls = TaggedCalls(_TAGS, tools)
        to = yield from _header(reader, pieces)
        while True:
            thinks = to == "self"
            take = pieces.think if thinks else pieces.say
            marks = () if thinks else calls.marks
            mark = yield from reader.before(_START, *_ENDS, *marks, take=take)
            if mark is None:
                return
            if mark == _START and (other := (yield from _header(reader, pieces))) is not None:
                to = other
                continue
            reader.take(len(mark))
            if mark in marks:
                yield from calls.read(reader, pieces, mark)
            elif mark in _ENDS:
                pieces.mark()
                to = yield from _header(reader, pieces)
            else:
                take(mark, reader.at - len(mark))

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        syntax = super().syntax(tools, spell, json)
        if syntax is None:
            return None
        calls = zip(tools, syntax.calls, strict=True)
        return replace(
            syntax,
            calls=tuple(f"{spell(f' to={tool.name}{_MESSAGE}')} {call}" for tool, call in calls),
            between=spell(f"{_NEXT}{_ASSISTANT}"),
            trigger=None,
        )


def _header(reader: Reader, pieces: Pieces) -> Wait[str | None]:
    """Whom the message is for that begins here; None where none does."""
    start = reader.hold()
    yield from reader.space()
    yield from reader.accept(_ASSISTANT)
    yield from reader.space()
    to = "user"
    if (yield from reader.accept("to=")) is not None:
        to = yield from reader.match(_RECIPIENT)
        reader.take(len(to))
    if not to or (yield from reader.accept(_MESSAGE)) is None:
        reader.rewind(start)
        return None
    reader.release()
    pieces.mark()
    return to
