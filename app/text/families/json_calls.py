"""Families whose tool calls are JSON objects after a marker, alone or in an array
(`app/text/syntax/json_calls.py`). Most of them differ in the texts around the calls only.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Knows: these texts, how to build a grammar from them. Must not know: the parser of JSON calls.

Sources: the chat templates of Apriel 1.5 and 1.6, Firefunction v2, GigaChat 3 and 3.1 (one call per
turn), Granite 3.0 to 3.3, Jamba 1.6, Qwen 2.5 and 3, and Nemotron Nano 2 (the templates of Llama
Nemotron use the same syntax); NousResearch's Hermes function calling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_calls
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_THINK = ("<think>", "</think>")
_FINAL, _FINAL_END = "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"
_MESSAGE_END, _ROLE_END = "<|message_sep|>", "<|role_sep|>"
_CALL_TURN = f"\n\nfunction call{_ROLE_END}\n"
_RESPONSE, _RESPONSE_END = "<response>", "</response>"


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
    """A family of the table. The arguments are the same as in `ChatFamily` and `MarkedFamily`."""

    def __init__(
        self,
        layout: JsonLayout,
        *,
        template_marks: Sequence[str],
        foreign_marks: Sequence[str] = (),
        call_markers: Sequence[str],
        call_close: str | None = None,
        markers: Sequence[str] = (),
        reasoning: ReasoningTags | None = None,
    ) -> None:
        self.layout = layout
        self.template_marks = tuple(template_marks)
        self.foreign_marks = tuple(foreign_marks)
        self.call_markers = tuple(call_markers)
        self.call_close = call_close
        self.markers = tuple(markers)
        self.reasoning = reasoning

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


class _Apriel(JsonFamily):
    """ServiceNow's Apriel also marks the response after the reasoning.

    Here are my reasoning steps:
    …
    [BEGIN FINAL RESPONSE]
    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>
    [END FINAL RESPONSE]
    """

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        output.hide(_FINAL, _FINAL_END)
        yield from super().parse_tool_calls(reader, output, tools)


class _GigaChat3(JsonFamily):
    """Sber's GigaChat 3 writes a call in a separate turn, which the model starts itself.

    <|message_sep|>

    function call<|role_sep|>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    """

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        if (yield from reader.accept(_CALL_TURN)) is None:
            return "none"
        return (yield from parse_calls(reader, output))


class _Granite(JsonFamily):
    """If IBM's Granite reasons, the response is between tags too: `<think>…</think>` is followed by
    `<response>…</response>`."""

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        if reader.at:  # after reasoning
            yield from reader.skip_space()
            if (yield from reader.accept(_RESPONSE)) is not None:
                output.add_marker()
                output.hide(_RESPONSE_END)
        yield from super().parse_tool_calls(reader, output, tools)


FAMILIES = {
    "apriel": _Apriel(
        JsonLayout(before="<tool_calls>[", between=", ", after="]</tool_calls>"),
        template_marks=("<tool_calls>[", _FINAL),
        call_markers=("<tool_calls>",),
        call_close="</tool_calls>",
        markers=("<tool_calls>", "</tool_calls>", _FINAL, _FINAL_END),
        reasoning=ReasoningTags(open="Here are my reasoning steps:", close=_FINAL),
    ),
    "firefunction": JsonFamily(
        JsonLayout(before=" functools[", between=", ", after="]", trigger=" functools["),
        template_marks=(" functools[",),
        call_markers=("functools",),
    ),
    "gigachat": _GigaChat3(
        JsonLayout(call_before=f"{_MESSAGE_END}{_CALL_TURN}"),
        template_marks=(_MESSAGE_END, _ROLE_END),
        foreign_marks=("<|function_call|>",),
        call_markers=(_MESSAGE_END,),
        markers=(_MESSAGE_END, _ROLE_END),
    ),
    "gigachat_31": JsonFamily(
        JsonLayout(call_before="<|function_call|>"),
        template_marks=("<|function_call|>", _MESSAGE_END),
        call_markers=("<|function_call|>",),
        markers=("<|function_call|>",),
    ),
    # Granite 3.1 writes `<tool_call>` instead of the token
    "granite": _Granite(
        JsonLayout(before="<|tool_call|>[", between=", ", after="]"),
        template_marks=("<|tool_call|>", "<|start_of_role|>"),
        call_markers=("<|tool_call|>", "<tool_call>"),
        markers=("<|tool_call|>",),
    ),
    # Hermes, Qwen and many other models
    "hermes": JsonFamily(
        JsonLayout(call_before="<tool_call>\n", between="\n", call_after="\n</tool_call>"),
        template_marks=("<tool_call>", '{"name":'),
        # other families that use the same tags
        foreign_marks=("<function=", "<arg_key>", "<use_mcp_tool>", "<tool_calls>"),
        call_markers=("<tool_call>",),
        call_close="</tool_call>",
        markers=("<tool_call>", "</tool_call>", *_THINK),
    ),
    "jamba": JsonFamily(
        JsonLayout(before="<tool_calls>[\n", between=",\n", after="\n]</tool_calls>"),
        template_marks=("<tool_calls>", "<tool_definitions>"),
        call_markers=("<tool_calls>",),
        call_close="</tool_calls>",
        markers=("<tool_calls>", "</tool_calls>"),
    ),
    "nemotron_v2": JsonFamily(
        JsonLayout(before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>"),
        template_marks=("<TOOLCALL>",),
        call_markers=("<TOOLCALL>",),
        call_close="</TOOLCALL>",
        markers=("<TOOLCALL>", "</TOOLCALL>", *_THINK),
    ),
}
