"""OLMo 3 writes its tool calls in Python syntax between tags, with one call per line.

    <function_calls>get_weather(city="Oslo")
    add(a=1, b=2)</function_calls>

Knows: these tags. Must not know: the parser of Python calls.

Source: Ai2's chat templates of OLMo 3 Instruct and Think.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.python_calls import build_python_grammar, parse_python_calls
from app.text.syntax.reader import Reader, Resumable

_OPEN, _CLOSE = "<function_calls>", "</function_calls>"


class Family(MarkedFamily):
    template_marks = (_OPEN, "<functions>")
    call_markers = (_OPEN,)
    call_close = _CLOSE
    markers = (_OPEN, _CLOSE, "<think>", "</think>")

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from parse_python_calls(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return build_python_grammar(
            tools, literal, json_schema, before=_OPEN, between="\n", after=_CLOSE, trigger=_OPEN
        )
