"""Incremental parsers of tool calls in Python syntax, `get_weather(city="Oslo", days=3)`, and of
Python literals, which they convert to JSON.

Knows: the syntax of a call and its arguments, the grammar of calls, Python's literals (language
reference, 2.4 and 6.2) and their JSON representation. Must not know: the markers around the calls
(they depend on the family).

The parsers are tolerant, because models do not always write valid literals, and chat templates
render strings without escaping them. JSON's `true`, `false` and `null` are accepted. A string may
contain line breaks. Unknown escapes are kept unchanged, except for JSON's `\\/`. A quotation mark
ends a string only if the following text is valid after a string.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from app.core.requests import Tool, ToolCall
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.argument_grammar import ArgumentGrammar, build_argument_grammar, extract_schema
from app.text.syntax.json_calls import CallOutcome, parse_call_list
from app.text.syntax.literal_reader import escape_json
from app.text.syntax.nested_values import KeyPath, Notation, WriteJson, parse_nested_pairs
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_WORD = re.compile(r"[\w.+-]*")
_WORDS = {
    "True": "true",
    "true": "true",
    "False": "false",
    "false": "false",
    "None": "null",
    "null": "null",
}
_DECIMAL = re.compile(r"([+-]?)(?:(0|[1-9][0-9]*)(?:\.([0-9]*))?|\.([0-9]+))((?:[eE][+-]?[0-9]+)?)")
_OTHER_BASES = re.compile(r"[+-]?0([xX][0-9a-fA-F]{1,64}|[oO][0-7]{1,64}|[bB][01]{1,64})")
_QUOTES = ('"""', "'''", '"', "'")
_SIMPLE_ESCAPES = {
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\n": "",  # line continuation
}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")

_NAME = re.compile(r"[^\W\d][\w.-]*")


def _parse_dictionary_key(reader: Reader) -> Resumable[str | None]:
    """Parses a key. JSON keys are strings, so other keys are converted to strings."""
    mark = reader.hold()
    pieces: list[str] = []
    complete = yield from _parse_scalar(reader, pieces.append)
    yield from reader.skip_space()
    if not complete or (yield from reader.accept(":")) is None:
        reader.rewind(mark)
        return None
    reader.release()
    text = "".join(pieces)
    return text if text.startswith('"') else json.dumps(text)


def _parse_scalar(reader: Reader, write: WriteJson, path: KeyPath = ()) -> Resumable[bool]:
    raw = yield from reader.peek_any(*(f"r{quote}" for quote in _QUOTES))
    if raw is not None:
        reader.take(1)
    quote = yield from reader.accept(*_QUOTES)
    if quote is not None:
        return (yield from _parse_string(reader, write, quote, raw=raw is not None))
    word = yield from reader.match(_WORD)
    converted = _WORDS.get(word) or _convert_number(word)
    if converted is None:
        return False
    reader.take(len(word))
    write(converted)
    return True


def _convert_number(word: str) -> str | None:
    """Converts a Python number to JSON. Returns None if the word is not a number or has no JSON
    representation."""
    word = word.replace("_", "")
    if _OTHER_BASES.fullmatch(word):
        return str(int(word, 0))
    match = _DECIMAL.fullmatch(word)
    if match is None:
        return None
    sign, integer, fraction, only_fraction, exponent = match.groups()
    digits = fraction if only_fraction is None else only_fraction
    text = ("-" if sign == "-" else "") + (integer or "0")
    if digits is not None:
        text += f".{digits or '0'}"
    return text + exponent


def _parse_string(reader: Reader, write: WriteJson, quote: str, *, raw: bool) -> Resumable[bool]:
    """Parses a string from its first character to its closing quotation marks."""
    write('"')
    while True:
        mark = yield from reader.read_until(
            quote, "\\", on_text=lambda text, _: write(escape_json(text))
        )
        if mark is None:
            return False
        if mark == "\\":
            write(
                (yield from _parse_raw_escape(reader))
                if raw
                else (yield from _parse_escape(reader))
            )
        elif (yield from _is_value_end(reader)):
            write('"')
            return True
        else:
            write(escape_json(quote))


def _is_value_end(reader: Reader) -> Resumable[bool]:
    """Returns whether the following text is valid after a value. Consumes nothing."""
    length = 0
    while True:
        rest = reader.ahead[length:].lstrip()
        if rest or reader.ended:
            return not rest or rest[0] in ",)]}:"
        length = len(reader.ahead)
        yield from reader.wait_for_more()


def _parse_raw_escape(reader: Reader) -> Resumable[str]:
    """Parses an escape in a raw string, in which a backslash and a following quotation mark are
    literal."""
    character = yield from reader.peek()
    return escape_json("\\" + reader.take(len(character)))


def _parse_escape(reader: Reader) -> Resumable[str]:
    """Converts an escape after its backslash to JSON."""
    character = yield from reader.peek()
    if character in _SIMPLE_ESCAPES:
        reader.take(1)
        return escape_json(_SIMPLE_ESCAPES[character])
    size = _HEX_ESCAPES.get(character, 0)
    while size and len(reader.ahead) <= size and (yield from reader.wait_for_more()):
        pass
    digits = reader.ahead[1 : size + 1]
    if not size or len(digits) < size or not _HEX.issuperset(digits):
        return "\\\\"
    code = int(digits, 16)
    if code > 0x10FFFF:
        return "\\\\"
    reader.take(size + 1)
    # the high surrogate of a pair, which JSON uses for characters beyond U+FFFF; the low surrogate
    # follows
    return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else escape_json(chr(code))


PYTHON_NOTATION = Notation(
    list_brackets={"[": "]", "(": ")"}, parse_key=_parse_dictionary_key, parse_scalar=_parse_scalar
)


def render_python_literal(value: Any) -> str:
    """Renders a JSON value as a Python literal, with strings in double quotes."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case dict():
            pairs = cast(dict[str, Any], value).items()
            rendered = (
                f"{render_python_literal(key)}: {render_python_literal(item)}"
                for key, item in pairs
            )
            return f"{{{', '.join(rendered)}}}"
        case list():
            return f"[{', '.join(map(render_python_literal, cast(list[Any], value)))}]"
        case _:
            return repr(value)


def parse_python_list(
    reader: Reader, output: OutputBuilder, *, names: Collection[str] | None = None
) -> Resumable[CallOutcome]:
    """Parses `[f(…), g(…)]`, like `parse_call_list`. The parameter `names` and the requirements on
    the caller are the same as for `parse_call_object`."""
    return (yield from parse_call_list(reader, output, partial(parse_python_call, names=names)))


def parse_python_calls(
    reader: Reader, output: OutputBuilder, *, names: Collection[str] | None = None
) -> Resumable[CallOutcome]:
    """Parses `f(…)`, and further calls after commas or white space. Otherwise, this behaves like
    `parse_python_list`."""
    outcome = yield from parse_python_call(reader, output, names=names)
    while outcome == "complete":
        mark = reader.hold()
        yield from reader.skip_space()
        yield from reader.accept(",")
        outcome = yield from parse_python_call(reader, output, names=names)
        if outcome == "none":
            reader.rewind(mark)
            return "complete"
    return outcome


def parse_python_call(
    reader: Reader,
    output: OutputBuilder,
    *,
    names: Collection[str] | None = None,
    method_suffix: str = "",
) -> Resumable[CallOutcome]:
    """Parses one call, after optional white space. Only keyword arguments are supported, and each
    argument is streamed. method_suffix: a suffix to remove from the name."""
    yield from reader.skip_space()
    written = yield from reader.match(_NAME)
    name = written.removesuffix(method_suffix)
    if not name or (names is not None and name not in names):
        return "none"
    reader.take(len(written))
    if (yield from reader.accept("(")) is None:
        return "none"
    output.start_tool_call(name)
    reader.release()
    output.add_arguments("{")
    complete = yield from parse_nested_pairs(
        PYTHON_NOTATION, reader, output.add_arguments, parse_key=_parse_keyword, close=")"
    )
    return "complete" if complete else "broken"


def build_python_grammar(
    tools: Sequence[Tool],
    literal: MakeLiteral,
    json_schema: MakeJsonSchema,
    *,
    before: str,
    between: str,
    after: str,
    trigger: str,
) -> ToolCallGrammar | None:
    """Builds the grammar for `ChatFamily.build_tool_call_grammar`, with the given texts around the
    calls. Returns None if a schema has constraints beyond the names and values of parameters.
    Values are written as JSON, which `parse_python_call` accepts, so the JSON grammar enforces
    their schemas."""
    calls: list[str] = []
    rules: list[str] = []
    for index, tool in enumerate(tools):
        arguments = _build_argument_grammar(tool, literal, json_schema, prefix=f"tool{index}arg")
        if arguments is None or not _NAME.fullmatch(tool.name):
            return None
        calls.append(f"{literal(f'{tool.name}(')} {arguments.expression} {literal(')')}")
        rules += arguments.rules
    return ToolCallGrammar(
        before=literal(before),
        calls=tuple(calls),
        between=literal(between),
        after=literal(after),
        trigger=trigger,
        rules="\n".join(rules),
    )


def render_python_call(call: ToolCall) -> str:
    """Renders one call, whose arguments must be a JSON object."""
    arguments: dict[str, Any] = json.loads(call.arguments.strip() or "{}")
    pairs = (f"{name}={render_python_literal(value)}" for name, value in arguments.items())
    return f"{call.name}({', '.join(pairs)})"


def _build_argument_grammar(
    tool: Tool, literal: MakeLiteral, json_schema: MakeJsonSchema, *, prefix: str
) -> ArgumentGrammar | None:
    root = tool.parameters

    def pair(name: str, schema: Any) -> str | None:
        value = extract_schema(schema, root)
        if value is None or not _NAME.fullmatch(name):
            return None
        return f"{literal(f'{name}=')} {json_schema(replace(tool, parameters=value))}"

    return build_argument_grammar(root, prefix, separator=literal(", "), pair=pair)


def _parse_keyword(reader: Reader) -> Resumable[str | None]:
    mark = reader.hold()
    name = yield from reader.match(_NAME)
    reader.take(len(name))
    yield from reader.skip_space()
    if not name or (yield from reader.accept("=")) is None:
        reader.rewind(mark)
        return None
    reader.release()
    return json.dumps(name, ensure_ascii=False)
