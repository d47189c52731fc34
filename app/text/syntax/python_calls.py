"""An incremental parser of tool calls in Python syntax, `get_weather(city="Oslo", days=3)`.

Knows: the syntax of a call and its arguments, the grammar of calls. Must not know: the markers
around the calls (they depend on the family), the notation of values.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from app.core.requests import Tool, ToolCall
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.argument_grammar import ArgumentGrammar, build_argument_grammar, extract_schema
from app.text.syntax.json_calls import CallOutcome, parse_call_list
from app.text.syntax.nested_values import parse_nested_pairs
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.python_literals import PYTHON_NOTATION, render_python_literal
from app.text.syntax.reader import Reader, Resumable

_NAME = re.compile(r"[^\W\d][\w.-]*")


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
