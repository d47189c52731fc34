"""Llama's calls where the template asks for Python: a list of them that is the whole answer.

    [get_weather(city="Oslo"), add(a=1, b=2)]

Source: Meta's documentation of Llama 3.2's prompts, and the templates for Llama 3.2 and 4 that vLLM
has made from it.
"""

from collections.abc import Sequence
from dataclasses import replace

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.llama_calls import END, START, TAG, llama_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.python_calls import python_syntax
from app.text.syntax.reader import Reader, Wait

_LLAMA = ("<|start_header_id|>", "<|header_start|>")


class Family(ChatFamily):
    markers = (TAG, START, END)

    def claims(self, template: str) -> bool:
        asks = "[func_name1(" in template and '"parameters": dictionary' not in template
        return asks and any(mark in template for mark in _LLAMA)

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from llama_calls(reader, pieces, tools)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        syntax = python_syntax(tools, spell, json, before="[", between=", ", after="]", trigger="[")
        # prose holds brackets
        return syntax and replace(syntax, trigger=None, leading=True)
