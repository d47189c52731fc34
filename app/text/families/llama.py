"""Llama models write tool calls as JSON or in Python syntax, with or without a token before them.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}
    [get_weather(city="Oslo")]
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}
    <|python_tag|>brave_search.call(query="Oslo")

Knows: the conditions for a call without the token (it must be at the start of the output and
contain the name of a tool), the templates that request each syntax. Must not know: the parsers of
JSON and Python calls.

Source: Meta's documentation of the prompts of Llama 3.1 to 4, its chat templates, and vLLM's
templates for Llama 3.2 and 4. The templates support one call per turn. Models that write several
calls separate them with a semicolon, a comma or a line break.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.family import ChatFamily
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_call_object
from app.text.syntax.marked_calls import parse_marked_call
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.python_calls import build_python_grammar, parse_python_call, parse_python_list
from app.text.syntax.reader import OnText, Reader, Resumable

_LLAMA = ("<|start_header_id|>", "<|header_start|>")
_PYTHON_TAG, _PYTHON_START, _PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


class _LlamaFamily(ChatFamily):
    markers = (_PYTHON_TAG, _PYTHON_START, _PYTHON_END)
    call_markers = (_PYTHON_TAG, _PYTHON_START)

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        if tools:
            yield from _parse_leading_calls(reader, output, {tool.name for tool in tools})
        yield from super().parse_tool_calls(reader, output, tools)

    def parse_call(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        mark: str,
        on_text: OnText,
    ) -> Resumable[bool]:
        names = {tool.name for tool in tools}
        called = yield from parse_marked_call(
            reader,
            output,
            parse=partial(_parse_tagged_call, names=names),
            open=mark,
            close=_PYTHON_END,
            ends=self.call_markers,
            on_text=on_text,
        )
        if called:
            yield from _parse_leading_calls(reader, output, names)
        return called


class _LlamaJson(_LlamaFamily):
    template_marks = ('{"name": function name, "parameters"',)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        """Builds a grammar for one call, because the template supports one call per turn."""
        return ToolCallGrammar(
            calls=tuple(
                build_call_expression(tool, literal, json_schema, arguments_key="parameters")
                for tool in tools
            ),
            leading=True,
        )


class _LlamaPythonic(_LlamaFamily):
    def matches(self, template: str) -> bool:
        asks = "[func_name1(" in template and '"parameters": dictionary' not in template
        return asks and any(mark in template for mark in _LLAMA)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        syntax = build_python_grammar(
            tools, literal, json_schema, before="[", between=", ", after="]", trigger="["
        )
        # prose may contain brackets
        return syntax and replace(syntax, trigger=None, leading=True)


FAMILIES = {"llama3": _LlamaJson(), "llama_pythonic": _LlamaPythonic()}


def _parse_leading_calls(
    reader: Reader, output: OutputBuilder, names: Collection[str]
) -> Resumable[None]:
    """Parses consecutive calls."""
    while True:
        start = reader.hold()
        yield from reader.skip_space()
        yield from reader.accept(";", ",")
        outcome = yield from _parse_bare_call(reader, output, names)
        if outcome == "none":
            reader.rewind(start)
            return
        if outcome == "broken":
            yield from reader.read_before(
                _PYTHON_TAG, _PYTHON_START, on_text=lambda text, _: output.add_arguments(text)
            )
        output.add_marker()


def _parse_bare_call(
    reader: Reader, output: OutputBuilder, names: Collection[str]
) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    if (yield from reader.peek()) == "[":
        return (yield from parse_python_list(reader, output, names=names))
    return (yield from parse_call_object(reader, output, names=names))


def _parse_tagged_call(
    reader: Reader, output: OutputBuilder, *, names: Collection[str]
) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    match (yield from reader.peek()):
        case "{":
            return (yield from parse_call_object(reader, output))
        case "[":
            return (yield from parse_python_list(reader, output))
        case _:
            # the token may also introduce code for an interpreter
            return (
                yield from parse_python_call(reader, output, names=names, method_suffix=".call")
            )
