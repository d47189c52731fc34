"""FunctionGemma writes tool calls in Gemma's notation, between tags.

    <start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>

Knows: these tags, the quotes of this version. Must not know: the parser of the notation
(`app/text/syntax/gemma_calls.py`).

Source: Google's documentation of FunctionGemma's formatting.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.gemma_calls import GemmaCallParser
from app.text.syntax.gemma_grammar import build_gemma_grammar
from app.text.syntax.json_calls import CallOutcome
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_OPEN, _CLOSE, _QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


class Family(MarkedFamily):
    template_marks = (_OPEN,)
    call_markers = (_OPEN,)
    call_close = _CLOSE
    markers = (_OPEN, _CLOSE, _QUOTE)

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        calls = GemmaCallParser(quote=_QUOTE, close=_CLOSE, tools=tools)
        return (yield from calls.parse(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return build_gemma_grammar(
            tools, literal, json_schema, open=_OPEN, close=_CLOSE, quote=_QUOTE
        )
