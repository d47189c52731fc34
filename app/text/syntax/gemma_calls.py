"""Gemma's calls, `call:get_weather{city:<|"|>Oslo<|"|>,days:3}`, as they are being written.

Keys have no quotes; strings stand between a token, and nothing in them is escaped, so that there is
no text that a string cannot hold but that token. Models forget it at times: a value without quotes
is what the tool's schema says.

Knows: this notation, and how a schema is held to in it. Must not know: which token quotes strings,
what stands around the calls.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from app.core.requests import Tool
from app.text.syntax.call_object import Outcome
from app.text.syntax.json_reader import json_value
from app.text.syntax.literal_reader import quoted
from app.text.syntax.nested_values import Notation, Path, Write, nested_pairs
from app.text.syntax.parameter_types import Types, to_json, types_of
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_CALL = "call:"
_NAME = re.compile(r"[^\s{}<]{1,256}")
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_ENDS = (",", "}", "]")  # of what has no quotes


def is_key(name: str) -> bool:
    """Whether a name can stand without quotes."""
    return _KEY.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCalls:
    """Reads the calls of one answer. quote: the token before and behind strings. close: what stands
    behind calls, which nothing but a string can hold."""

    quote: str
    close: str
    tools: Sequence[Tool]

    def read(self, reader: Reader, pieces: Pieces) -> Wait[Outcome]:
        """One call, and others right behind it; as `call_object`."""
        outcome = yield from self._call(reader, pieces)
        while outcome == "whole":
            behind = reader.hold()
            outcome = yield from self._call(reader, pieces)
            if outcome == "none":
                reader.rewind(behind)
                return "whole"
        return outcome

    def _call(self, reader: Reader, pieces: Pieces) -> Wait[Outcome]:
        yield from reader.space()
        if (yield from reader.accept(_CALL)) is None:
            return "none"
        name = yield from reader.match(_NAME)
        reader.take(len(name))
        if not name or (yield from reader.accept("{")) is None:
            return "none"
        pieces.call(name)
        reader.release()
        pieces.arguments("{")
        notation = Notation(lists={"[": "]"}, key=self._key, scalar=_Values(self, name).read)
        whole = yield from nested_pairs(notation, reader, pieces.arguments)
        return "whole" if whole else "broken"

    def _key(self, reader: Reader) -> Wait[str | None]:
        held = reader.hold()
        if (yield from reader.accept(self.quote)) is not None:
            name, end = yield from reader.text_until(self.quote)
            yield from reader.space()
            colon = (yield from reader.accept(":")) is not None
        else:
            name, end = yield from reader.text_until(":", "{", "[", *_ENDS, self.quote, self.close)
            colon = end == ":"
        if end is None or not colon:
            reader.rewind(held)
            return None
        reader.release()
        return json.dumps(name.strip(), ensure_ascii=False)

    def string(self, reader: Reader, write: Write) -> Wait[bool]:
        """The rest of one behind its first quote."""
        write('"')
        end = yield from reader.until(self.quote, take=lambda text, _: write(quoted(text)))
        if end is not None:
            write('"')
        return end is not None


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of one call."""

    calls: GemmaCalls
    name: str

    def read(self, reader: Reader, write: Write, path: Path) -> Wait[bool]:
        if (yield from reader.accept(self.calls.quote)) is not None:
            return (yield from self.calls.string(reader, write))
        if (yield from reader.peek()) == '"':
            return (yield from json_value(reader, lambda text, _: write(text))) == "whole"
        held = reader.hold()
        raw: list[str] = []
        quote, close = self.calls.quote, self.calls.close
        end = yield from reader.before(*_ENDS, quote, close, take=lambda text, _: raw.append(text))
        text = "".join(raw)
        if not text.strip() or end in (None, quote):
            # cut, or no value: it is handed on as it is
            reader.rewind(held)
            return False
        reader.release()
        write(to_json(text.strip(), self._types(path)))
        return True

    def _types(self, path: Path) -> Types | None:
        """What the tool's schema says of the parameter that stands there; of what lies within one
        nothing: that is what it looks like."""
        [name, *within] = path
        tool = next((tool for tool in self.calls.tools if tool.name == self.name), None)
        return None if tool is None or name is None or within else types_of(tool.parameters, name)
