"""Kimi writes a tool call as an ID that contains the function's name, followed by JSON, between
tokens.

    <|tool_calls_section_begin|>
    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
    <|tool_call_end|>
    <|tool_calls_section_end|>

The output has no line breaks. Source: the chat templates of Kimi K2 and K2 Thinking, and the tool
call guidance in MoonshotAI's repository Kimi-K2.

Knows: these tokens, the format of an ID. Must not know: the JSON parser, other families.
"""

import re
from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, parse_json_arguments
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_ID = re.compile(r"[^\s<]+")
_PARTS = re.compile(r"(?P<full>functions\.)?(?P<name>.+?)(?P<index>:[0-9]+)?")


class Family(MarkedFamily):
    template_marks = (_CALL, _ARGUMENTS)
    call_markers = (_SECTION, _CALL)
    call_close = _SECTION_END
    markers = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END, "<think>", "</think>")

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from _parse_call(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            before=literal(_SECTION),
            calls=tuple(
                " ".join(
                    (
                        literal(f"{_CALL}functions.{tool.name}:"),
                        "/[0-9]{1,3}/",
                        literal(_ARGUMENTS),
                        json_schema(tool),
                        literal(_CALL_END),
                    )
                )
                for tool in tools
            ),
            between="",
            after=literal(_SECTION_END),
            trigger=_SECTION,
        )


def _parse_call(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    """Parses a call after the start of a section or of the call, which are both optional."""
    yield from reader.skip_space()
    yield from reader.accept(_CALL)
    yield from reader.skip_space()
    id = yield from reader.match(_ID)
    parts = _PARTS.fullmatch(id)
    reader.take(len(id))
    yield from reader.skip_space()
    if parts is None or (yield from reader.accept(_ARGUMENTS)) is None:
        return "none"
    # an ID in a different format than the template's is replaced
    complete = parts["full"] and parts["index"]
    output.start_tool_call(parts["name"], id if complete else None)
    reader.release()
    yield from parse_json_arguments(reader, output, _CALL_END, _CALL, _SECTION_END)
    yield from reader.accept(_CALL_END)
    return "complete"
