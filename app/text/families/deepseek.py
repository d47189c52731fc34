"""DeepSeek's models up to V3.1 write tool calls between tokens.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>…<｜tool▁call▁end｜><｜tool▁calls▁end｜>

A call has one of two forms, without line breaks between the tokens. One parser reads both.

    get_weather<｜tool▁sep｜>{"city": "Oslo"}

    function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Oslo"}
    ```

Knows: these tokens, the code block. Must not know: the JSON parser.

Source: the chat templates of DeepSeek V3, R1, V3.1, of R1's distilled models, and of Cogito.
"""

import re
from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, parse_json_arguments
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _FENCE_END = "```json", "```"

_WORD = re.compile(r"[^\s<{`]+")


class _DeepSeekFamily(MarkedFamily):
    call_markers = (_CALLS, _CALL)
    call_close = _CALLS_END
    markers = (_CALLS, _CALLS_END, _CALL, _SEPARATOR, _CALL_END, "<think>", "</think>")

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from _parse_call(reader, output))


class _DeepSeekR1(_DeepSeekFamily):
    template_marks = (_CALLS, _FENCE)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        begin, block = f"{_CALL}function{_SEPARATOR}", f"\n{_FENCE}\n"
        end = literal(f"\n{_FENCE_END}{_CALL_END}")
        return ToolCallGrammar(
            before=literal(_CALLS),
            calls=tuple(
                f"{literal(begin + tool.name + block)} {json_schema(tool)} {end}" for tool in tools
            ),
            between=literal("\n"),
            after=literal(_CALLS_END),
            trigger=_CALLS,
        )


class _DeepSeekV31(_DeepSeekFamily):
    template_marks = (_CALLS,)
    foreign_marks = (_FENCE,)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            before=literal(_CALLS),
            calls=tuple(
                f"{literal(f'{_CALL}{tool.name}{_SEPARATOR}')} {json_schema(tool)} "
                f"{literal(_CALL_END)}"
                for tool in tools
            ),
            between="",
            after=literal(_CALLS_END),
            trigger=_CALLS,
        )


FAMILIES = {"deepseek_r1": _DeepSeekR1(), "deepseek_v31": _DeepSeekV31()}


def _parse_call(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    """Parses one call and its end marker. All calls of a group begin with the same token."""
    yield from reader.skip_space()
    yield from reader.accept(_CALL)
    name = yield from _parse_word(reader)
    if (yield from reader.accept(_SEPARATOR)) is None:
        return "none"
    # if a name follows, the previous word was the call type
    name = (yield from _parse_word(reader)) or name
    if not name:
        return "none"
    output.start_tool_call(name)
    reader.release()
    yield from reader.skip_space()
    fenced = (yield from reader.accept(_FENCE, _FENCE_END)) is not None
    ends = (_CALL_END, _CALLS_END, _CALL)
    met = yield from parse_json_arguments(
        reader, output, *((_FENCE_END, *ends) if fenced else ends)
    )
    if met == _FENCE_END:
        yield from reader.accept(_FENCE_END)
        yield from reader.skip_space()
    yield from reader.accept(_CALL_END)
    return "complete"


def _parse_word(reader: Reader) -> Resumable[str]:
    word = yield from reader.match(_WORD)
    return reader.take(len(word))
