"""Some Llama templates request tool calls in Python syntax. The list of calls is the whole output.

    [get_weather(city="Oslo"), add(a=1, b=2)]

Knows: the templates that request this notation. Must not know: the tokens around a call
(`app/text/syntax/llama_calls.py`), the parser of Python calls.

Source: Meta's documentation of Llama 3.2's prompts, and vLLM's templates for Llama 3.2 and 4.
"""

from collections.abc import Sequence
from dataclasses import replace

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.llama_calls import LlamaFamily
from app.text.syntax.python_calls import build_python_grammar

_LLAMA = ("<|start_header_id|>", "<|header_start|>")


class Family(LlamaFamily):
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
