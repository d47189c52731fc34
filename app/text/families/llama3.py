"""Llama 3 writes a tool call as a JSON object. The object is the whole output, or it follows a
token.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}

Knows: the key of the arguments. Must not know: the tokens around a call
(`app/text/syntax/llama_calls.py`), the parser of JSON calls.

Source: Meta's chat templates of Llama 3.1 to 4.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import build_call_expression
from app.text.syntax.llama_calls import LlamaFamily


class Family(LlamaFamily):
    def matches(self, template: str) -> bool:
        # quotation marks may be escaped in a Jinja literal
        return '{"name": function name, "parameters"' in template.replace('\\"', '"')

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
