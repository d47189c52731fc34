"""Cohere's models write tool calls as a JSON list of actions. Command R7B, Command A and Cohere2MoE
delimit each part of the output with special tokens, and Cohere2MoE has its own tokens around text.

    <|START_THINKING|>I think…<|END_THINKING|>
    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}
    ]<|END_ACTION|>
    <|START_RESPONSE|>It rains.<|END_RESPONSE|>

The output has no line breaks between the parts. Command R and R+ of 2024 write the list in a code
block after a keyword:

    Action:
    ```json
    [
        {
            "tool_name": "get_weather",
            "parameters": {"city": "Oslo"}
        }
    ]
    ```

Knows: these tokens, the code block, the keys of an action. Must not know: the JSON parser, the
validation of arguments.

Source: the chat templates of these models.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, parse_call_object, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_THINKING, _THINKING_END = "<|START_THINKING|>", "<|END_THINKING|>"
_ACTION, _ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
_KEYWORD, _FENCE = "Action:", "```"


class _Cohere(MarkedFamily):
    call_markers = (_ACTION,)
    call_close = _ACTION_END
    content_prefix = "<|START_RESPONSE|>"
    content_suffix = "<|END_RESPONSE|>"
    markers = (_THINKING, _THINKING_END, _ACTION, _ACTION_END, content_prefix, content_suffix)
    reasoning = ReasoningTags(open=_THINKING, close=_THINKING_END)

    def matches(self, template: str) -> bool:
        return _ACTION in template and self.content_prefix in template

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from _parse_actions(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            before=literal(f"{_ACTION}[\n    "),
            calls=tuple(
                " ".join(
                    (
                        literal('{"tool_call_id": "'),
                        "/[0-9]{1,3}/",
                        literal(f'", "tool_name": "{tool.name}", "parameters": '),
                        json_schema(tool),
                        literal("}"),
                    )
                )
                for tool in tools
            ),
            between=literal(",\n    "),
            after=literal(f"\n]{_ACTION_END}"),
            trigger=_ACTION,
        )


class _CohereMoe(_Cohere):
    content_prefix = "<|START_TEXT|>"
    content_suffix = "<|END_TEXT|>"
    markers = (*_Cohere.markers, content_prefix, content_suffix)


class _CommandR(MarkedFamily):
    template_marks = ('"tool_name": title of the tool',)
    call_markers = (_KEYWORD,)
    call_close = _FENCE

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        yield from reader.skip_space()
        if (yield from reader.accept(_FENCE, f"{_FENCE}json")) is None:
            return "none"
        return (yield from _parse_actions(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            before=literal(f"{_KEYWORD}\n{_FENCE}json\n[\n"),
            calls=tuple(
                " ".join(
                    (
                        literal(f'    {{\n        "tool_name": "{tool.name}",\n'),
                        literal('        "parameters": '),
                        json_schema(tool),
                        literal("\n    }"),
                    )
                )
                for tool in tools
            ),
            between=literal(",\n"),
            after=literal(f"\n]\n{_FENCE}"),
            trigger=f"{_KEYWORD}\n{_FENCE}json",
        )


FAMILIES = {"cohere": _Cohere(), "cohere_moe": _CohereMoe(), "command_r": _CommandR()}


def _parse_actions(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    return (yield from parse_calls(reader, output, _parse_action))


def _parse_action(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    return (
        yield from parse_call_object(
            reader,
            output,
            name_keys=("tool_name", "name"),
            argument_keys=("parameters", "arguments"),
            id_keys=("tool_call_id",),
        )
    )
