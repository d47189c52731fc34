"""FunctionGemma: Gemma's notation of calls between tags.

    <start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>

Source: Google's documentation of FunctionGemma's formatting.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.gemma_calls import GemmaCalls
from app.text.syntax.gemma_rules import gemma_syntax
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

_OPEN, _CLOSE, _QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


class Family(ChatFamily):
    markers = (_OPEN, _CLOSE, _QUOTE)

    def claims(self, template: str) -> bool:
        return _OPEN in template

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        read = GemmaCalls(quote=_QUOTE, close=_CLOSE, tools=tools).read
        yield from marked_calls(reader, pieces, tools, read=read, open=_OPEN, close=_CLOSE)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return gemma_syntax(tools, spell, json, open=_OPEN, close=_CLOSE, quote=_QUOTE)
