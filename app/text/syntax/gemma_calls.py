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
from app.text.syntax.json_calls import CallOutcome
from app.text.syntax.json_reader import parse_json_value
from app.text.syntax.literal_reader import escape_json
from app.text.syntax.nested_values import KeyPath, Notation, WriteJson, parse_nested_pairs
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.parameter_types import JsonTypes, get_parameter_types, to_json
from app.text.syntax.reader import Reader, Resumable

_CALL = "call:"
_NAME = re.compile(r"[^\s{}<]{1,256}")
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_VALUE_ENDS = (",", "}", "]")  # of what has no quotes


def is_key(name: str) -> bool:
    """Whether a name can stand without quotes."""
    return _KEY.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCallParser:
    """Reads the calls of one answer. quote: the token before and behind strings. close: what stands
    behind calls, which nothing but a string can hold."""

    quote: str
    close: str
    tools: Sequence[Tool]

    def parse(self, reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
        """One call, and others right behind it; as `parse_call_object`."""
        outcome = yield from self._parse_call(reader, output)
        while outcome == "whole":
            behind = reader.hold()
            outcome = yield from self._parse_call(reader, output)
            if outcome == "none":
                reader.rewind(behind)
                return "whole"
        return outcome

    def _parse_call(self, reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
        yield from reader.skip_space()
        if (yield from reader.accept(_CALL)) is None:
            return "none"
        name = yield from reader.match(_NAME)
        reader.take(len(name))
        if not name or (yield from reader.accept("{")) is None:
            return "none"
        output.start_tool_call(name)
        reader.release()
        output.add_arguments("{")
        notation = Notation(
            list_brackets={"[": "]"},
            parse_key=self._parse_key,
            parse_scalar=_ValueParser(self, name).parse,
        )
        whole = yield from parse_nested_pairs(notation, reader, output.add_arguments)
        return "whole" if whole else "broken"

    def _parse_key(self, reader: Reader) -> Resumable[str | None]:
        held = reader.hold()
        if (yield from reader.accept(self.quote)) is not None:
            name, end = yield from reader.read_text_until(self.quote)
            yield from reader.skip_space()
            colon = (yield from reader.accept(":")) is not None
        else:
            name, end = yield from reader.read_text_until(
                ":", "{", "[", *_VALUE_ENDS, self.quote, self.close
            )
            colon = end == ":"
        if end is None or not colon:
            reader.rewind(held)
            return None
        reader.release()
        return json.dumps(name.strip(), ensure_ascii=False)

    def parse_string(self, reader: Reader, write: WriteJson) -> Resumable[bool]:
        """The rest of one behind its first quote."""
        write('"')
        end = yield from reader.read_until(
            self.quote, on_text=lambda text, _: write(escape_json(text))
        )
        if end is not None:
            write('"')
        return end is not None


@dataclass(frozen=True, slots=True)
class _ValueParser:
    """The values of one call."""

    parser: GemmaCallParser
    name: str

    def parse(self, reader: Reader, write: WriteJson, path: KeyPath) -> Resumable[bool]:
        if (yield from reader.accept(self.parser.quote)) is not None:
            return (yield from self.parser.parse_string(reader, write))
        if (yield from reader.peek()) == '"':
            return (yield from parse_json_value(reader, lambda text, _: write(text))) == "whole"
        held = reader.hold()
        raw: list[str] = []
        quote, close = self.parser.quote, self.parser.close
        end = yield from reader.read_before(
            *_VALUE_ENDS, quote, close, on_text=lambda text, _: raw.append(text)
        )
        text = "".join(raw)
        if not text.strip() or end in (None, quote):
            # cut, or no value: it is handed on as it is
            reader.rewind(held)
            return False
        reader.release()
        write(to_json(text.strip(), self._get_types(path)))
        return True

    def _get_types(self, path: KeyPath) -> JsonTypes | None:
        """What the tool's schema says of the parameter that stands there; of what lies within one
        nothing: that is what it looks like."""
        [name, *within] = path
        tool = next((tool for tool in self.parser.tools if tool.name == self.name), None)
        return (
            None
            if tool is None or name is None or within
            else get_parameter_types(tool.parameters, name)
        )
