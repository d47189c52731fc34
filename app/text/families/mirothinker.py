"""MiroThinker writes a tool call as JSON between tags, with the names of the tool and its server.

    <use_mcp_tool>
    <server_name>generic-extras</server_name>
    <tool_name>get_weather</tool_name>
    <arguments>
    {"city": "Oslo"}
    </arguments>
    </use_mcp_tool>

Knows: these tags. Must not know: the JSON parser, the existing servers.

Source: MiroMind's chat template of MiroThinker. The template derives the server from the tool's
name, so the parser ignores the server.
"""

import re
from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, parse_json_arguments
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_OPEN, _CLOSE = "<use_mcp_tool>", "</use_mcp_tool>"
_SERVER, _SERVER_END = "<server_name>", "</server_name>"
_NAME, _NAME_END = "<tool_name>", "</tool_name>"
_ARGUMENTS, _ARGUMENTS_END = "<arguments>", "</arguments>"
_WORD = re.compile(r"[^\s<]+")


class Family(MarkedFamily):
    template_marks = (_OPEN, _NAME)
    call_markers = (_OPEN,)
    call_close = _CLOSE
    markers = ("<think>", "</think>")

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from _parse_calls(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        server = f"{literal(f'{_SERVER}')} /[a-z_-]{{1,40}}/"
        end = literal(f"\n{_ARGUMENTS_END}\n")
        return ToolCallGrammar(
            before=literal(f"{_OPEN}\n"),
            calls=tuple(
                f"{server} {literal(_build_call_head(tool.name))} {json_schema(tool)} {end}"
                for tool in tools
            ),
            between="",
            after=literal(_CLOSE),
            trigger=_OPEN,
        )


def _build_call_head(name: str) -> str:
    return f"{_SERVER_END}\n{_NAME}{name}{_NAME_END}\n{_ARGUMENTS}\n"


def _parse_calls(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    outcome = yield from _parse_call(reader, output)
    while outcome == "complete":
        behind = reader.hold()
        outcome = yield from _parse_call(reader, output)
        if outcome == "none":
            reader.rewind(behind)
            return "complete"
    return outcome


def _parse_call(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    yield from _parse_tagged_word(reader, _SERVER, _SERVER_END)
    name = yield from _parse_tagged_word(reader, _NAME, _NAME_END)
    if not name:
        return "none"
    output.start_tool_call(name)
    reader.release()
    yield from reader.skip_space()
    yield from reader.accept(_ARGUMENTS)
    yield from parse_json_arguments(reader, output, _ARGUMENTS_END, _CLOSE)
    yield from reader.accept(_ARGUMENTS_END)
    return "complete"


def _parse_tagged_word(reader: Reader, open: str, close: str) -> Resumable[str]:
    """Parses the word between two tags. Returns "" if there is none."""
    yield from reader.skip_space()
    if (yield from reader.accept(open)) is None:
        return ""
    word = yield from reader.match(_WORD)
    reader.take(len(word))
    return "" if (yield from reader.accept(close)) is None else word
