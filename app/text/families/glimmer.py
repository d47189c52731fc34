"""Muse Glimmer uses the ATEM format. An output consists of several messages, each with a recipient.

     to=self<|message|>I think…<|eom|>
    <|start|>assistant to=get_weather<|message|><atem:function_calls>
    <atem:invoke name="get_weather">
    <atem:parameter name="city">Oslo</atem:parameter>
    </atem:invoke>
    </atem:function_calls>

A message to "self" is reasoning, and a message to a tool contains calls. All other messages are for
the user. The prompt ends with `<|start|>assistant`. `<|eot|>` is a stop token, so it is usually not
part of the text.

Knows: the headers of messages, the tags of calls. Must not know: the parser of tagged calls.

Source: the model's chat template.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable
from app.text.syntax.tagged_calls import CallTags, TaggedFamily

_TAGS = CallTags(
    before="<atem:function_calls>",
    after="</atem:function_calls>",
    begin='<atem:invoke name="',
    name_end='">',
    end="</atem:invoke>",
    key_begin='<atem:parameter name="',
    key_ends={'">': None},
    value_end="</atem:parameter>",
)
_START, _MESSAGE, _NEXT = "<|start|>", "<|message|>", "<|eom|>"
_ENDS = (_NEXT, "<|eot|>")
_ASSISTANT = f"{_START}assistant"
_THINK = ReasoningTags(open=f" to=self{_MESSAGE}", close=_NEXT)
_RECIPIENT = re.compile(r"[^\s<]{1,256}")


class Family(TaggedFamily):
    content_prefix = f" to=user{_MESSAGE}"
    # the first message was opened by the prompt
    reasoning_separator = _ASSISTANT

    def __init__(self) -> None:
        super().__init__(_TAGS, template_marks=(_TAGS.before,))
        self.markers = (_START, _MESSAGE, *_ENDS, _TAGS.before, _TAGS.after)

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        return _THINK

    def parse_output(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        tags: ReasoningTags | None,
        *,
        in_reasoning: bool,
    ) -> Resumable[None]:
        """Parses all messages. in_reasoning: whether the first one is to "self"."""
        to = "self" if in_reasoning else (yield from _parse_header(reader, output))
        if in_reasoning:
            output.add_marker()
        while True:
            thinks = to == "self"
            take = output.add_reasoning if thinks else output.add_content
            calls = self.find_reasoning_ends(output, tools) if thinks else self.call_markers
            calls = calls if tools else ()
            mark = yield from reader.read_before(_START, *_ENDS, *calls, on_text=take)
            if mark is None:
                return
            if mark == _START and (other := (yield from _parse_header(reader, output))) is not None:
                to = other
                continue
            reader.take(len(mark))
            if mark in calls:
                if (yield from self.parse_call(reader, output, tools, mark, take)):
                    to = None
            else:
                output.add_marker()
                to = yield from _parse_header(reader, output)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        syntax = super().build_tool_call_grammar(tools, literal, json_schema)
        if syntax is None:
            return None
        calls = zip(tools, syntax.calls, strict=True)
        return replace(
            syntax,
            calls=tuple(f"{literal(f' to={tool.name}{_MESSAGE}')} {call}" for tool, call in calls),
            between=literal(f"{_NEXT}{_ASSISTANT}"),
            trigger=None,
        )


def _parse_header(reader: Reader, output: OutputBuilder) -> Resumable[str | None]:
    """Returns the recipient of the message that starts here, or None if no message starts here."""
    start = reader.hold()
    yield from reader.skip_space()
    yield from reader.accept(_ASSISTANT)
    yield from reader.skip_space()
    to = "user"
    if (yield from reader.accept("to=")) is not None:
        to = yield from reader.match(_RECIPIENT)
        reader.take(len(to))
    if not to or (yield from reader.accept(_MESSAGE)) is None:
        reader.rewind(start)
        return None
    reader.release()
    output.add_marker()
    return to
