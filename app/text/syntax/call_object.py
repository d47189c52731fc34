"""A tool call written as one JSON object, `{"name": …, "arguments": {…}}`, as it is being written.

Knows: the names that models give to its two parts, and that these come in either order. Must not
know: what stands around the object, which is a family's affair.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from app.core.requests import Tool
from app.text.family import Json, Spell
from app.text.syntax.json_reader import decoded, json_string, json_value
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

Outcome = Literal["none", "whole", "broken"]
"""No call was begun: rewind. A call was read. A call was begun, and what follows is not JSON: it
belongs to its arguments, so that nothing of it is lost."""


@dataclass(slots=True)
class _Call:
    reader: Reader
    pieces: Pieces
    names: Collection[str] | None
    name: str | None = None
    id: str | None = None
    early: list[str] = field(default_factory=list[str])  # arguments that came before the name
    begun: bool = False
    argued: bool = False
    behind: int | None = None  # the arguments of a call that was begun

    def begin(self) -> bool:
        if self.name is None or (self.names is not None and self.name not in self.names):
            return False
        self.pieces.call(self.name, self.id)
        self.reader.release()  # there is no way back now
        self.begun = True
        self.pieces.arguments("".join(self.early))
        return True


def call_object(
    reader: Reader,
    pieces: Pieces,
    *,
    name_keys: Collection[str] = ("name",),
    argument_keys: Collection[str] = ("arguments", "parameters"),
    id_keys: Collection[str] = ("id",),
    names: Collection[str] | None = None,
) -> Wait[Outcome]:
    """Read one such object, white space before it skipped. names: those of the tools, where an
    object of another name or with other keys is no call; None to take any. Nothing is put into
    `pieces` before the name is known; the caller holds the reader, and rewinds it after "none"."""
    call = _Call(reader, pieces, names)
    yield from reader.space()
    if (yield from reader.accept("{")) is None:
        return "none"
    while True:
        yield from reader.space()
        if (yield from reader.accept("}")) is not None:
            return _close(call)
        key = yield from json_string(reader)
        yield from reader.space()
        if key is None or (yield from reader.accept(":")) is None:
            return _broken(call)
        known = (*name_keys, *argument_keys, *id_keys, "type")
        if names is not None and key not in known and not call.begun:
            return "none"  # an answer in JSON must not be held back to its end
        if not (yield from _value(reader, call, key, name_keys, argument_keys, id_keys)):
            return _broken(call)
        yield from reader.space()
        if (yield from reader.accept(",")) is None and (yield from reader.peek()) != "}":
            return _broken(call)


def spell_object(
    tool: Tool,
    spell: Spell,
    json_of: Json,
    *,
    before: str = "",
    after: str = "",
    arguments: str = "arguments",
) -> str:
    """The Lark expression of such an object; see `ChatFamily.syntax`. before, after: what else is
    to stand there. arguments: their key."""
    name = json.dumps(tool.name, ensure_ascii=False)
    begin = f'{before}{{"name": {name}, "{arguments}": '
    return f"{spell(begin)} {json_of(tool)} {spell('}' + after)}"


def _value(
    reader: Reader,
    call: _Call,
    key: str,
    name_keys: Collection[str],
    argument_keys: Collection[str],
    id_keys: Collection[str],
) -> Wait[bool]:
    """The value of one key. Whether it could be read."""
    if key in argument_keys:
        return not call.argued and (yield from _arguments(reader, call))
    if key in name_keys:
        call.name = yield from json_string(reader)
        return call.name is not None
    yield from reader.space()
    if key in id_keys and (yield from reader.peek()) == '"':
        call.id = yield from json_string(reader)
        return call.id is not None
    return (yield from json_value(reader, lambda text, at: None)) == "whole"


def _arguments(reader: Reader, call: _Call) -> Wait[bool]:
    """They are handed on as they come where the name stands before them. Some models write them as
    a string that holds the object."""
    call.argued = True
    if call.name is not None and not call.begin():
        return False
    take = call.pieces.arguments if call.begun else call.early.append
    yield from reader.space()
    if (yield from reader.peek()) != '"':
        whole = (yield from json_value(reader, lambda text, at: take(text))) == "whole"
    else:
        written: list[str] = []
        end = yield from json_value(reader, lambda text, at: written.append(text))
        text = decoded("".join(written)) if end == "whole" else None
        take("".join(written) if text is None else text or "{}")
        whole = text is not None
    if whole and call.begun:
        call.behind = reader.hold()
    return whole


def _close(call: _Call) -> Outcome:
    if call.begun:
        call.reader.release()
        return "whole"
    if not call.begin():
        return "none"
    if not call.argued:
        call.pieces.arguments("{}")
    return "whole"


def _broken(call: _Call) -> Outcome:
    if call.behind is not None:
        call.reader.rewind(call.behind)
    return "broken" if call.begun else "none"
