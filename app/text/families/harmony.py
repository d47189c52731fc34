"""Harmony, how gpt-oss speaks: messages with a header each, of which one answer holds several.

    <|channel|>analysis<|message|>I think…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
    {"city": "Oslo"}<|call|>

(without the line breaks). A header names a channel and may name a recipient: what goes to a
function is a call, what goes nowhere is reasoning in the channel "analysis" and text in any other.
`<|call|>` and `<|return|>` end the answer, so they are mostly not in its text. The prompt ends with
`<|start|>assistant`.

Source: OpenAI's description of the harmony response format, and the template of gpt-oss.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell, Tags
from app.text.syntax.json_arguments import json_arguments
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Take, Wait

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TO = "to="

# a role, a channel, a recipient, a type of content
_WORD = re.compile(r"[^\s<]{1,256}")
_MOST_WORDS = 12

# recipients that are no functions
_NOBODY = ("assistant", "user", "all")


@dataclass(slots=True)
class _Header:
    """whole: it was read to its end, else the text ended within it."""

    channel: str | None = None
    recipient: str | None = None
    whole: bool = False

    @property
    def function(self) -> str | None:
        """What is called, if anything is."""
        if self.recipient is None or self.recipient in _NOBODY:
            return None
        return self.recipient.removeprefix("functions.") or None


class Family(ChatFamily):
    markers = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
    lead = f"{_CHANNEL}final{_MESSAGE}"
    # the first message was begun by the prompt
    restart = f"{_START}assistant"

    def claims(self, template: str) -> bool:
        return f"{_CHANNEL}analysis{_MESSAGE}" in template

    def tags(self, template: str) -> Tags | None:
        return Tags(open=f"{_CHANNEL}analysis{_MESSAGE}", close="<|end|>")

    def reasoning(self, reader: Reader, pieces: Pieces, tags: Tags, *, opened: bool) -> Wait[None]:
        """Only what the prompt began: all other reasoning is a message of its own."""
        if opened:
            pieces.mark()
            yield from _content(reader, pieces, pieces.think)

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        while (yield from reader.peek()):
            start = reader.hold()
            header = yield from _header(reader)
            if header is None or (header.function is not None and not tools):
                size = reader.at - start if header else 0
                reader.rewind(start)
                yield from _text(reader, pieces, size)
                continue
            reader.release()
            pieces.mark()
            if not header.whole:
                return
            if header.function is not None:
                yield from _call(reader, pieces, header.function)
            else:
                said = header.channel != "analysis"
                yield from _content(reader, pieces, pieces.say if said else pieces.think)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        """One call, which ends the answer: the model knows no others. The recipient stands behind
        the channel, where the model puts it mostly, or before it, where the template does."""
        kind = f"({spell(f' {_CONSTRAIN}json')} | {spell(' json')})?"
        return CallSyntax(
            calls=tuple(
                " ".join((_heads(tool.name, spell), kind, spell(_MESSAGE), json(tool)))
                for tool in tools
            ),
        )


def _heads(name: str, spell: Spell) -> str:
    channel, to = f"{_CHANNEL}commentary", f" {_TO}functions.{name}"
    return f"({spell(channel + to)} | {spell(to + channel)})"


def _header(reader: Reader) -> Wait[_Header | None]:
    """What the text goes on with to the beginning of a message's content; None if that is no
    header. A header that is cut within a marker or a word of it is none."""
    header = _Header()
    marked = False
    for _ in range(_MOST_WORDS):
        yield from reader.space()
        mark = yield from reader.accept(_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _TO)
        if mark == _MESSAGE:
            header.whole = True
            return header
        if mark is None and not (yield from reader.peek()):
            return header if marked else None
        if mark is None and not marked and header.recipient is None:
            return None
        marked = marked or mark not in (None, _TO)
        yield from reader.space()
        word = yield from reader.match(_WORD)
        if not word and (yield from reader.peek()) != "":
            return None
        reader.take(len(word))
        if mark == _TO:
            header.recipient = word
        elif mark == _CHANNEL:
            header.channel = word
    return None


def _text(reader: Reader, pieces: Pieces, size: int) -> Wait[None]:
    """What stands outside of a message. size: characters that do in any case."""
    if not size and (yield from reader.meets(*_ENDS)) is None:
        size = 1
    pieces.say(reader.take(size), reader.at - size)
    yield from _content(reader, pieces, pieces.say)


def _content(reader: Reader, pieces: Pieces, take: Take) -> Wait[None]:
    """To the end of the message, or the beginning of another one."""
    if (yield from reader.before(_START, *_ENDS, take=take)) is not None:
        yield from reader.accept(*_ENDS)
        pieces.mark()


def _call(reader: Reader, pieces: Pieces, name: str) -> Wait[None]:
    pieces.call(name)
    yield from json_arguments(reader, pieces, _START, *_ENDS)
    yield from reader.accept(*_ENDS)
    pieces.mark()
