"""Incremental parsers of tool calls in JSON. They support an object `{"name": …, "arguments":
{…}}`, an array of such objects, and arguments without a name between markers.

Knows: the keys that models use for the name and the arguments, both orders of these keys. Must not
know: the markers around the object, which depend on the family.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral
from app.text.syntax.json_reader import (
    decode_json_string,
    parse_json_string,
    parse_json_to_own_bracket,
    parse_json_value,
)
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

CallOutcome = Literal["none", "complete", "broken"]

ParseCall = Callable[[Reader, OutputBuilder], Resumable[CallOutcome]]
"""Parses one or more calls. Returns the same values as `parse_call_object`."""


def parse_call_object(
    reader: Reader,
    output: OutputBuilder,
    *,
    name_keys: Collection[str] = ("name",),
    argument_keys: Collection[str] = ("arguments", "parameters"),
    id_keys: Collection[str] = ("id",),
    names: Collection[str] | None = None,
) -> Resumable[CallOutcome]:
    """Parses one call object, after optional white space. names: the names of the tools. An object
    with a different name or different keys is not a call. None accepts any name. Nothing is added
    to `output` before the name is known. The caller must hold the reader, and rewind it if the
    result is "none"."""
    call = _Call(reader, output, names)
    yield from reader.skip_space()
    if (yield from reader.accept("{")) is None:
        return "none"
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept("}")) is not None:
            return _finish_call(call)
        key = yield from parse_json_string(reader)
        yield from reader.skip_space()
        if key is None or (yield from reader.accept(":")) is None:
            return _fail_call(call)
        keys = (*name_keys, *argument_keys, *id_keys, "type")
        if names is not None and key not in keys and not call.is_started:
            return "none"  # do not hold back a whole response in JSON
        if not (yield from _parse_value(reader, call, key, name_keys, argument_keys, id_keys)):
            return _fail_call(call)
        yield from reader.skip_space()
        if (yield from reader.accept(",")) is None and (yield from reader.peek()) != "}":
            return _fail_call(call)


def parse_call_list(
    reader: Reader, output: OutputBuilder, parse: ParseCall = parse_call_object
) -> Resumable[CallOutcome]:
    """Parses an array of call objects, after optional white space. Otherwise, this behaves like
    `parse_call_object`. After a complete call, text that is neither another call nor the end of the
    array is not consumed."""
    yield from reader.skip_space()
    if (yield from reader.accept("[")) is None:
        return "none"
    outcome = yield from parse(reader, output)
    while outcome == "complete":
        behind = reader.hold()
        yield from reader.skip_space()
        if (yield from reader.accept("]")) is not None:
            reader.release()
            return "complete"
        more = (yield from reader.accept(",")) is not None or (yield from reader.peek()) == "{"
        outcome = (yield from parse(reader, output)) if more else "none"
        if outcome == "none":
            reader.rewind(behind)
            return "complete"
    return outcome


def parse_calls(
    reader: Reader, output: OutputBuilder, parse: ParseCall = parse_call_object
) -> Resumable[CallOutcome]:
    """Parses one call, several calls with optional commas between them, or arrays of calls.
    Otherwise, this behaves like `parse_call_object`."""
    outcome = yield from _parse_call_or_list(reader, output, parse)
    while outcome == "complete":
        behind = reader.hold()
        yield from reader.skip_space()
        yield from reader.accept(",", ";")
        outcome = yield from _parse_call_or_list(reader, output, parse)
        if outcome == "none":
            reader.rewind(behind)
            return "complete"
    return outcome


def _parse_call_or_list(
    reader: Reader, output: OutputBuilder, parse: ParseCall
) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    if (yield from reader.peek()) == "[":
        return (yield from parse_call_list(reader, output, parse))
    return (yield from parse(reader, output))


def parse_json_arguments(
    reader: Reader, output: OutputBuilder, *ends: str
) -> Resumable[str | None]:
    """Outputs the arguments of the current call, up to one of the given markers, which is not
    consumed. Returns the marker, or None if the text ends without a marker.

    Markers within JSON strings are ignored. Arguments that are not JSON are output unchanged. An
    object ends at its own brace: surplus brackets after it are dropped, and other text is content.
    If there is no text, the arguments are an empty object.
    """

    def take(text: str, at: int) -> None:
        output.add_arguments(text)

    yield from reader.skip_space()
    met = yield from reader.peek_any(*ends)
    if met is not None:
        output.add_arguments("{}")
        return met
    reader.call_ends = ends
    is_object = (yield from reader.peek()) == "{"
    end = yield from parse_json_to_own_bracket(reader, take)
    if end == "complete":
        yield from reader.skip_space()
    if end == "complete" and is_object:
        while (yield from reader.accept("}", "]")) is not None:
            yield from reader.skip_space()
        output.add_marker()
        return (yield from reader.read_before(*ends, on_text=output.add_content))
    return (yield from reader.read_before(*ends, on_text=take))


"""The outcome of parsing a call. "none": no call was started, so the caller must rewind the reader.
"complete": a call was parsed. "broken": a call was started, but the following text is not JSON. The
text becomes part of the arguments, so that no text is lost."""


@dataclass(slots=True)
class _Call:
    reader: Reader
    output: OutputBuilder
    tool_names: Collection[str] | None
    name: str | None = None
    id: str | None = None
    early_arguments: list[str] = field(
        default_factory=list[str]
    )  # arguments that were parsed before the name
    is_started: bool = False
    has_arguments: bool = False
    arguments_end: int | None = None  # the end position of the arguments of a started call

    def start(self) -> bool:
        if self.name is None or (self.tool_names is not None and self.name not in self.tool_names):
            return False
        self.output.start_tool_call(self.name, self.id)
        self.reader.release()  # the reader cannot be rewound after this
        self.is_started = True
        self.output.add_arguments("".join(self.early_arguments))
        return True


def build_call_expression(
    tool: Tool,
    literal: MakeLiteral,
    json_schema: MakeJsonSchema,
    *,
    before: str = "",
    after: str = "",
    arguments_key: str = "arguments",
) -> str:
    """Returns the Lark expression of a call object; see `ChatFamily.build_tool_call_grammar`.
    before, after: the expressions around the object. arguments_key: the key of the arguments."""
    name = json.dumps(tool.name, ensure_ascii=False)
    begin = f'{before}{{"name": {name}, "{arguments_key}": '
    return f"{literal(begin)} {json_schema(tool)} {literal('}' + after)}"


def _parse_value(
    reader: Reader,
    call: _Call,
    key: str,
    name_keys: Collection[str],
    argument_keys: Collection[str],
    id_keys: Collection[str],
) -> Resumable[bool]:
    """Parses the value of one key. Returns whether it could be parsed."""
    if key in argument_keys:
        return not call.has_arguments and (yield from _parse_arguments(reader, call))
    if key in name_keys:
        call.name = yield from parse_json_string(reader)
        return call.name is not None
    yield from reader.skip_space()
    if key in id_keys and (yield from reader.peek()) == '"':
        call.id = yield from parse_json_string(reader)
        return call.id is not None
    return (yield from parse_json_value(reader, lambda text, at: None)) == "complete"


def _parse_arguments(reader: Reader, call: _Call) -> Resumable[bool]:
    """Parses the arguments. If the name comes first, the arguments are streamed. Some models
    write the arguments as a string that contains the object."""
    call.has_arguments = True
    if call.name is not None and not call.start():
        return False
    take = call.output.add_arguments if call.is_started else call.early_arguments.append
    yield from reader.skip_space()
    if (yield from reader.peek()) != '"':
        end = yield from parse_json_to_own_bracket(reader, lambda text, at: take(text))
        complete = end == "complete"
    else:
        written: list[str] = []
        end = yield from parse_json_value(reader, lambda text, at: written.append(text))
        text = decode_json_string("".join(written)) if end == "complete" else None
        take("".join(written) if text is None else text or "{}")
        complete = text is not None
    if complete and call.is_started:
        call.arguments_end = reader.hold()
    return complete


def _finish_call(call: _Call) -> CallOutcome:
    if call.is_started:
        call.reader.release()
        return "complete"
    if not call.start():
        return "none"
    if not call.has_arguments:
        call.output.add_arguments("{}")
    return "complete"


def _fail_call(call: _Call) -> CallOutcome:
    if call.arguments_end is not None:
        call.reader.rewind(call.arguments_end)
    return "broken" if call.is_started else "none"
