"""Llama 3's calls: a JSON object that is the whole answer, or stands behind a token.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}

Source: Meta's chat templates of Llama 3.1 to 4.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.call_object import spell_object
from app.text.syntax.llama_calls import END, START, TAG, llama_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait


class Family(ChatFamily):
    markers = (TAG, START, END)

    def claims(self, template: str) -> bool:
        # in a literal of Jinja's the quotation marks may be escaped
        return '{"name": function name, "parameters"' in template.replace('\\"', '"')

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        yield from llama_calls(reader, pieces, tools)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        """The template knows one call a turn."""
        return CallSyntax(
            calls=tuple(spell_object(tool, spell, json, arguments="parameters") for tool in tools),
            leading=True,
        )
