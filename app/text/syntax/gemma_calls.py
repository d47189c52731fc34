"""An incremental parser of Gemma's tool calls, `call:get_weather{city:<|"|>Oslo<|"|>,days:3}`.

Knows: this notation, the types of values in a schema. Must not know: the token that quotes strings,
the markers around calls.

Keys are not quoted. Strings are enclosed in quote tokens and have no escapes, so a string can
contain any text except the quote token. Models sometimes omit the quote token. The type of an
unquoted value is determined by the tool's schema.
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
_VALUE_ENDS = (",", "}", "]")  # these characters end an unquoted value


def is_key(name: str) -> bool:
    """Returns whether a name can be a key without quotes."""
    return _KEY.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCallParser:
    """Parses the calls of one output. quote: the token around strings. close: the token after the
    calls. Within a call, `close` may occur only in a string."""

    quote: str
    close: str
    tools: Sequence[Tool]

    def parse(self, reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
        """Parses one call, and any calls immediately after it. Returns the same values as
        `parse_call_object`."""
        outcome = yield from self._parse_call(reader, output)
        while outcome == "complete":
            behind = reader.hold()
            outcome = yield from self._parse_call(reader, output)
            if outcome == "none":
                reader.rewind(behind)
                return "complete"
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
        complete = yield from parse_nested_pairs(notation, reader, output.add_arguments)
        return "complete" if complete else "broken"

    def _parse_key(self, reader: Reader) -> Resumable[str | None]:
        mark = reader.hold()
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
            reader.rewind(mark)
            return None
        reader.release()
        return json.dumps(name.strip(), ensure_ascii=False)

    def parse_string(self, reader: Reader, write: WriteJson) -> Resumable[bool]:
        """Parses the rest of a string after its opening quote."""
        write('"')
        end = yield from reader.read_until(
            self.quote, on_text=lambda text, _: write(escape_json(text))
        )
        if end is not None:
            write('"')
        return end is not None


@dataclass(frozen=True, slots=True)
class _ValueParser:
    """Parses the values of one call."""

    parser: GemmaCallParser
    name: str

    def parse(self, reader: Reader, write: WriteJson, path: KeyPath) -> Resumable[bool]:
        if (yield from reader.accept(self.parser.quote)) is not None:
            return (yield from self.parser.parse_string(reader, write))
        if (yield from reader.peek()) == '"':
            return (yield from parse_json_value(reader, lambda text, _: write(text))) == "complete"
        mark = reader.hold()
        raw: list[str] = []
        quote, close = self.parser.quote, self.parser.close
        end = yield from reader.read_before(
            *_VALUE_ENDS, quote, close, on_text=lambda text, _: raw.append(text)
        )
        text = "".join(raw)
        if not text.strip() or end in (None, quote):
            # the value is truncated or invalid, so output it unchanged
            reader.rewind(mark)
            return False
        reader.release()
        write(to_json(text.strip(), self._get_types(path)))
        return True

    def _get_types(self, path: KeyPath) -> JsonTypes | None:
        """Returns the types that the schema allows for the parameter at `path`. Returns None for
        nested values, because their syntax determines their type."""
        [name, *within] = path
        tool = next((tool for tool in self.parser.tools if tool.name == self.name), None)
        return (
            None
            if tool is None or name is None or within
            else get_parameter_types(tool.parameters, name)
        )
