"""LFM2 writes its tool calls as a Python list between tags. LFM2.5 sometimes omits the tags.

    <|tool_call_start|>[get_weather(city="Oslo"), add(a=1, b=2)]<|tool_call_end|>

If the prompt requests it, the models write a JSON list between the tags instead. Source: the chat
templates of LFM2, LFM2.5 and LFM2.5-VL, and Liquid AI's documentation of tool use.

Knows: these tokens, both notations between them. Must not know: the parsers of Python and JSON
calls.
"""

from collections.abc import Collection, Sequence

from app.core.requests import Tool, ToolCall
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.python_calls import build_python_grammar, parse_python_list, render_python_call
from app.text.syntax.reader import Reader, Resumable

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


class Family(MarkedFamily):
    call_markers = (_OPEN,)
    call_close = _CLOSE
    markers = (_OPEN, _CLOSE, "<think>", "</think>")

    def matches(self, template: str) -> bool:
        if "<|tool_list_start|>" in template or f"{_OPEN}[" in template:
            return True
        return "List of tools: [" in template and "keep_past_thinking" in template

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        """Returns the reasoning tags. Some models reason even though their templates do not contain
        the tags."""
        return ReasoningTags(open="<think>", close="</think>")

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        marks = (_OPEN, "[") if tools else ()
        names = {tool.name for tool in tools}
        take = output.add_content
        while (mark := (yield from reader.read_before(*marks, on_text=take))) is not None:
            if mark == "[":
                yield from _parse_bare_list(reader, output, names)
            else:
                reader.take(len(mark))
                yield from self.parse_call(reader, output, tools, mark, take)

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from _parse_list(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return build_python_grammar(
            tools,
            literal,
            json_schema,
            before=f"{_OPEN}[",
            between=", ",
            after=f"]{_CLOSE}",
            trigger=_OPEN,
        )

    def render_calls(self, calls: Sequence[ToolCall]) -> str | None:
        return f"{_OPEN}[{', '.join(map(render_python_call, calls))}]{_CLOSE}"


def _parse_list(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    start = reader.hold()
    outcome = yield from parse_python_list(reader, output)
    if outcome == "none":
        reader.rewind(start)
        reader.hold()
        outcome = yield from parse_calls(reader, output)
    return outcome


def _parse_bare_list(
    reader: Reader, output: OutputBuilder, names: Collection[str]
) -> Resumable[None]:
    """Parses a list without tags, or a bracket in the text. Only a list with the name of a tool is
    parsed as a call."""
    start = reader.hold()
    outcome = yield from parse_python_list(reader, output, names=names)
    if outcome == "none":
        reader.rewind(start)
        output.add_content(reader.take(1), start)
        return
    if outcome == "broken":
        yield from reader.read_until(on_text=lambda text, _: output.add_arguments(text))
    output.add_marker()
