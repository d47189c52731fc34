"""Functionary 3.1 writes the arguments of a tool call as JSON in a tag with the name of the
function. Llama 3.1 uses the same format for custom functions.

    <function=get_weather>{"city": "Oslo"}</function>

The token `<|python_tag|>` is followed by the arguments of a function named python.

Knows: these tags, the token for Python code. Must not know: the JSON parser, other families.

Source: MeetKai's chat template of Functionary medium v3.1.
"""

import re
from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.family import ChatFamily
from app.text.syntax.json_calls import CallOutcome, parse_json_arguments
from app.text.syntax.json_reader import parse_json_to_own_bracket
from app.text.syntax.marked_calls import parse_marked_call
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import OnText, Reader, Resumable

_OPEN, _CLOSE = "<function=", "</function>"
_PYTHON = "<|python_tag|>"
_NAME = re.compile(r"[^\s<>{]+")


class Family(ChatFamily):
    template_marks = (f'{_OPEN}example_function_name>{{"',)
    markers = (_PYTHON,)
    call_markers = (_OPEN, _PYTHON)

    def parse_call(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        mark: str,
        on_text: OnText,
    ) -> Resumable[bool]:
        return (
            yield from parse_marked_call(
                reader,
                output,
                parse=_parse_python_call if mark == _PYTHON else _parse_tagged_call,
                open=mark,
                ends=self.call_markers,
                on_text=on_text,
            )
        )

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            calls=tuple(
                f"{literal(f'{_OPEN}{tool.name}>')} {json_schema(tool)} {literal(_CLOSE)}"
                for tool in tools
            ),
            between="",
            trigger=_OPEN,
        )


def _parse_tagged_call(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    name = yield from reader.match(_NAME)
    reader.take(len(name))
    if not name or (yield from reader.accept(">")) is None:
        return "none"
    output.start_tool_call(name)
    reader.release()
    yield from parse_json_arguments(reader, output, _CLOSE, _OPEN, _PYTHON)
    yield from reader.accept(_CLOSE)
    return "complete"


def _parse_python_call(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        return "none"
    output.start_tool_call("python")
    reader.release()
    end = yield from parse_json_to_own_bracket(reader, lambda text, _: output.add_arguments(text))
    return "complete" if end == "complete" else "broken"
