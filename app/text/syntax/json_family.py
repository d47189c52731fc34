"""The base class of families whose tool calls are JSON objects, alone or in an array.

    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>

Knows: how to build a grammar from the texts around calls. Must not know: the markers of any family,
the parser of JSON calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLayout:
    """The texts around calls, as the chat template writes them.

    before, between, after: around all calls of an output; between is None if an output has at most
    one call. call_before, call_after: around each call. trigger: see `ToolCallGrammar`; the marker
    of calls by default."""

    before: str = ""
    between: str | None = None
    after: str = ""
    call_before: str = ""
    call_after: str = ""
    trigger: str | None = None


class JsonFamily(MarkedFamily):
    def __init__(
        self,
        layout: JsonLayout,
        *,
        template_marks: Sequence[str],
        foreign_marks: Sequence[str] = (),
        call_markers: Sequence[str],
        call_close: str | None = None,
        markers: Sequence[str] = (),
    ) -> None:
        self.layout = layout
        self.template_marks = tuple(template_marks)
        self.foreign_marks = tuple(foreign_marks)
        self.call_markers = tuple(call_markers)
        self.call_close = call_close
        self.markers = tuple(markers)

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from parse_calls(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        layout = self.layout
        before, after = layout.call_before, layout.call_after
        return ToolCallGrammar(
            before=layout.before and literal(layout.before),
            calls=tuple(
                build_call_expression(tool, literal, json_schema, before=before, after=after)
                for tool in tools
            ),
            between=layout.between and literal(layout.between),
            after=layout.after and literal(layout.after),
            trigger=layout.trigger or self.call_markers[0],
        )
