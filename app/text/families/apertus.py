"""Apertus writes its tool calls as a JSON array between tokens. Each function name is the key of
its arguments.

    <|inner_prefix|>…<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}]<|tools_suffix|>

Calls may occur within reasoning, and the reasoning may continue after a call.

Knows: these tokens, the format of the array, calls within reasoning. Must not know: the validation
of arguments, other families.

Source: the chat template of Apertus 8B Instruct.
"""

import json as json_text
from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, parse_calls
from app.text.syntax.json_reader import parse_json_string, parse_json_to_own_bracket
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALLS_END = "<|tools_prefix|>", "<|tools_suffix|>"
_THOUGHT, _THOUGHT_END = "<|inner_prefix|>", "<|inner_suffix|>"


class Family(MarkedFamily):
    template_marks = (_CALLS, _CALLS_END)
    call_markers = (_CALLS,)
    call_close = _CALLS_END
    markers = (_CALLS, _CALLS_END, _THOUGHT, _THOUGHT_END)
    reasoning = ReasoningTags(open=_THOUGHT, close=_THOUGHT_END)

    def parse_output(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        tags: ReasoningTags | None,
        *,
        in_reasoning: bool,
    ) -> Resumable[None]:
        """Parses content, reasoning and calls in any order. A call does not end the reasoning."""
        thinking = in_reasoning
        while True:
            take = output.add_reasoning if thinking else output.add_content
            calls = self.find_reasoning_ends(output, tools) if thinking else self.call_markers
            calls = calls if tools else ()
            mark = yield from reader.read_until(_THOUGHT, _THOUGHT_END, *calls, on_text=take)
            if mark is None:
                return
            if mark in calls:
                yield from self.parse_call(reader, output, tools, mark, take)
                continue
            output.add_marker()
            thinking = mark == _THOUGHT

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from parse_calls(reader, output, _parse_keyed_call))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            before=literal(f"{_CALLS}["),
            calls=tuple(
                f"{literal(f'{{{_quote_json(tool.name)}: ')} {json_schema(tool)} {literal('}')}"
                for tool in tools
            ),
            between=literal(", "),
            after=literal(f"]{_CALLS_END}"),
            trigger=_CALLS,
        )


def _parse_keyed_call(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    if (yield from reader.accept("{")) is None:
        return "none"
    name = yield from parse_json_string(reader)
    yield from reader.skip_space()
    if name is None or (yield from reader.accept(":")) is None:
        return "none"
    output.start_tool_call(name)
    reader.release()
    end = yield from parse_json_to_own_bracket(reader, lambda text, _: output.add_arguments(text))
    if end != "complete":
        return "broken"
    yield from reader.skip_space()
    return "broken" if (yield from reader.accept("}")) is None else "complete"


def _quote_json(text: str) -> str:
    return json_text.dumps(text, ensure_ascii=False)
