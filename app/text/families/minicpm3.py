"""MiniCPM3 writes its tool calls as a block of Python between tags, after the reasoning.

    <|thought_start|>
    I should look.
    <|thought_end|>
    <|tool_call_start|>
    ```python
    get_weather(city="Oslo")
    ```
    <|tool_call_end|>

Knows: these tokens, the code block. Must not know: the parser of Python calls.

Source: the chat template of MiniCPM3-4B.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.python_calls import build_python_grammar, parse_python_calls
from app.text.syntax.reader import Reader, Resumable

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_THOUGHT, _THOUGHT_END = "<|thought_start|>", "<|thought_end|>"
_FENCE = "```"


class Family(MarkedFamily):
    template_marks = (_OPEN, _THOUGHT)
    call_markers = (_OPEN,)
    call_close = _CLOSE
    markers = (_OPEN, _CLOSE, _THOUGHT, _THOUGHT_END)

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        return ReasoningTags(open=_THOUGHT, close=_THOUGHT_END)

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from _parse_block(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return build_python_grammar(
            tools,
            literal,
            json_schema,
            before=f"{_OPEN}\n{_FENCE}python\n",
            between="\n",
            after=f"\n{_FENCE}\n{_CLOSE}",
            trigger=_OPEN,
        )


def _parse_block(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    yield from reader.accept(f"{_FENCE}python", _FENCE)
    outcome = yield from parse_python_calls(reader, output)
    if outcome == "complete":
        yield from reader.skip_space()
        yield from reader.accept(_FENCE)
    return outcome
