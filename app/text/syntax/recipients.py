"""Answers in parts, each of which begins with whom it is for: everybody, or a function.

    all
    Let me see.
    >>>get_weather
    {"city": "Oslo"}

Knows: how such an answer is read. Must not know: what stands between the parts.

Source: MeetKai's chat templates of Functionary 2 and 3. The prompt ends where the first recipient
is to be written.
"""

import re
from collections.abc import Collection, Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.json_reader import json_value
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Take, Wait

_EVERYBODY = "all"
_WORD = re.compile(r"[^\s<>]+")


class RecipientFamily(ChatFamily):
    """separator: before a recipient, but for the first. gap: white space before that. opening:
    behind a recipient."""

    separator: str
    gap: str = ""
    opening: str

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        names = {_EVERYBODY, *(tool.name for tool in tools)}
        start = reader.hold()
        to = yield from self._recipient(reader, names)
        if to is None:
            reader.rewind(start)
        else:
            reader.release()
            pieces.mark()
        part: str | None = to or _EVERYBODY
        while part is not None:
            take = pieces.say
            if part != _EVERYBODY:
                take = yield from _arguments(reader, pieces, part)
            part = yield from self._rest(reader, pieces, names, take)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return CallSyntax(
            calls=tuple(f"{spell(tool.name + self.opening)} {json(tool)}" for tool in tools),
            between=spell(self.gap + self.separator),
        )

    def _rest(
        self, reader: Reader, pieces: Pieces, names: Collection[str], take: Take
    ) -> Wait[str | None]:
        """Read to the end of a part. Who the next one is for; None if there is none."""
        while (yield from reader.until(self.separator, take=take)) is not None:
            inside = reader.hold()
            to = yield from self._recipient(reader, names)
            if to is not None:
                reader.release()
                pieces.mark()
                return to
            reader.rewind(inside)
            take(self.separator, inside - len(self.separator))
        return None

    def _recipient(self, reader: Reader, names: Collection[str]) -> Wait[str | None]:
        word = yield from reader.match(_WORD)
        if word not in names:
            return None
        reader.take(len(word))
        return None if (yield from reader.accept(self.opening)) is None else word


def _arguments(reader: Reader, pieces: Pieces, name: str) -> Wait[Take]:
    """Begin a call. Who gets what stands behind its arguments: they do."""

    def take(text: str, at: int) -> None:
        pieces.arguments(text)

    pieces.call(name)
    if (yield from json_value(reader, take)) == "whole":
        yield from reader.space()
    return take
