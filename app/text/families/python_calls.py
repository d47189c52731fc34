"""Families whose tool calls are Python calls between tags (`app/text/syntax/python_calls.py`).

    OLMo 3      <function_calls>get_weather(city="Oslo")
                add(a=1, b=2)</function_calls>

    LFM2        <|tool_call_start|>[get_weather(city="Oslo"), add(a=1, b=2)]<|tool_call_end|>

    MiniCPM3    <|thought_start|>
                I should look.
                <|thought_end|>
                <|tool_call_start|>
                ```python
                get_weather(city="Oslo")
                ```
                <|tool_call_end|>

Knows: these tokens, the text between them. Must not know: the parsers of Python and JSON calls.

Sources: the chat templates of OLMo 3 Instruct and Think, of LFM2, LFM2.5 and LFM2.5-VL, and of
MiniCPM3-4B; Liquid AI's documentation of tool use.
"""

from collections.abc import Collection, Sequence

from app.core.requests import Tool, ToolCall
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.family import THINK_TAGS
from app.text.syntax.json_calls import CallOutcome, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.python_calls import (
    build_python_grammar,
    parse_python_calls,
    parse_python_list,
    render_python_call,
)
from app.text.syntax.reader import Reader, Resumable

# of LFM2 and MiniCPM3
_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"

_THINK = (THINK_TAGS.open, THINK_TAGS.close)
_THOUGHT, _THOUGHT_END = "<|thought_start|>", "<|thought_end|>"
_FENCE = "```"


class _PythonFamily(MarkedFamily):
    """before, between, after: the texts around all calls of an output."""

    before: str
    between: str = "\n"
    after: str

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from parse_python_calls(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return build_python_grammar(
            tools,
            literal,
            json_schema,
            before=self.before,
            between=self.between,
            after=self.after,
            trigger=self.call_markers[0],
        )


class _Lfm2(_PythonFamily):
    """LFM2.5 sometimes omits the tags around the list. If the prompt requests it, the models write
    a JSON list between the tags instead. Some models reason even though their templates do not
    contain the tags of reasoning."""

    call_markers = (_OPEN,)
    call_close = _CLOSE
    markers = (_OPEN, _CLOSE, *_THINK)
    reasoning = THINK_TAGS
    before, between, after = f"{_OPEN}[", ", ", f"]{_CLOSE}"

    def matches(self, template: str) -> bool:
        if "<|tool_list_start|>" in template or f"{_OPEN}[" in template:
            return True
        return "List of tools: [" in template and "keep_past_thinking" in template

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
        start = reader.hold()
        outcome = yield from parse_python_list(reader, output)
        if outcome == "none":
            reader.rewind(start)
            reader.hold()
            outcome = yield from parse_calls(reader, output)
        return outcome

    def render_calls(self, calls: Sequence[ToolCall]) -> str | None:
        return f"{_OPEN}[{', '.join(map(render_python_call, calls))}]{_CLOSE}"


class _MiniCpm3(_PythonFamily):
    template_marks = (_OPEN, _THOUGHT)
    call_markers = (_OPEN,)
    call_close = _CLOSE
    markers = (_OPEN, _CLOSE, _THOUGHT, _THOUGHT_END)
    reasoning = ReasoningTags(open=_THOUGHT, close=_THOUGHT_END)
    before, after = f"{_OPEN}\n{_FENCE}python\n", f"\n{_FENCE}\n{_CLOSE}"

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        yield from reader.skip_space()
        yield from reader.accept(f"{_FENCE}python", _FENCE)
        outcome = yield from parse_python_calls(reader, output)
        if outcome == "complete":
            yield from reader.skip_space()
            yield from reader.accept(_FENCE)
        return outcome


class _Olmo3(_PythonFamily):
    before, after = "<function_calls>", "</function_calls>"
    template_marks = (before, "<functions>")
    call_markers = (before,)
    call_close = after
    markers = (before, after, *_THINK)


FAMILIES = {"lfm2": _Lfm2(), "minicpm3": _MiniCpm3(), "olmo3": _Olmo3()}


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
