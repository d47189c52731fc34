"""gpt-oss uses the harmony format. An output consists of several messages, each with a header.

    <|channel|>analysis<|message|>I think…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
    {"city": "Oslo"}<|call|>

The output has no line breaks. A header contains a channel and optionally a recipient. A message to
a function is a call. A message without a recipient is reasoning in the "analysis" channel, and text
in any other channel. `<|call|>` and `<|return|>` are stop tokens, so they are usually not part
of the text. The prompt ends with `<|start|>assistant`.

Knows: channels, recipients and headers. Must not know: the JSON parser, other families.

Source: OpenAI's description of the harmony response format, and the template of gpt-oss.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.family import ChatFamily
from app.text.syntax.json_calls import parse_json_arguments
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import OnText, Reader, Resumable

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TO = "to="

# a role, a channel, a recipient or a content type
_WORD = re.compile(r"(?:[^\s<]|<(?!\|)){1,256}")
_MAX_HEADER_WORDS = 12

_CHANNELS = ("analysis", "commentary", "final")
_ROLES = ("assistant", "user", "system", "developer", "tool")

# recipients that are not functions
_NON_FUNCTION_RECIPIENTS = ("assistant", "user", "all")


@dataclass(slots=True)
class _Header:
    """The header of a message. is_complete: whether the header is complete; if not, the text ended
    within the header."""

    channel: str | None = None
    recipient: str | None = None
    is_complete: bool = False

    @property
    def function(self) -> str | None:
        """The called function, or None if the message is not a call."""
        if self.recipient is None or self.recipient in _NON_FUNCTION_RECIPIENTS:
            return None
        return self.recipient.removeprefix("functions.") or None


class Family(ChatFamily):
    template_marks = (f"{_CHANNEL}analysis{_MESSAGE}",)
    markers = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
    content_prefix = f"{_CHANNEL}final{_MESSAGE}"
    # the first message was opened by the prompt
    reasoning_separator = f"{_START}assistant"

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        return ReasoningTags(open=f"{_CHANNEL}analysis{_MESSAGE}", close="<|end|>")

    def parse_reasoning(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        tags: ReasoningTags,
        *,
        in_reasoning: bool,
    ) -> Resumable[None]:
        """Parses only reasoning that was opened by the prompt. All other reasoning is in separate
        messages."""
        if in_reasoning:
            output.add_marker()
            yield from _parse_content(reader, output, output.add_reasoning)

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        while (yield from reader.peek()):
            start = reader.hold()
            header = yield from _parse_header(reader)
            if header is None:
                reader.rewind(start)
                header = yield from _parse_damaged_header(reader)
            reader.release()
            if reader.at > start:
                output.add_marker()
            if not header.is_complete:
                return
            if header.function is not None and tools:
                yield from _parse_call(reader, output, header.function)
            else:
                is_content = header.channel != "analysis"
                yield from _parse_content(
                    reader, output, output.add_content if is_content else output.add_reasoning
                )

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        """Builds a grammar for one call, which ends the output, because the model supports only one
        call per turn. The recipient comes after the channel, as in most outputs, or before it, as
        in the template."""
        kind = f"({literal(f' {_CONSTRAIN}json')} | {literal(' json')})?"
        return ToolCallGrammar(
            calls=tuple(
                " ".join(
                    (
                        _build_header_expression(tool.name, literal),
                        kind,
                        literal(_MESSAGE),
                        json_schema(tool),
                    )
                )
                for tool in tools
            ),
        )


def _build_header_expression(name: str, literal: MakeLiteral) -> str:
    channel, to = f"{_CHANNEL}commentary", f" {_TO}functions.{name}"
    return f"({literal(channel + to)} | {literal(to + channel)})"


def _parse_header(reader: Reader) -> Resumable[_Header | None]:
    """Parses a header up to the start of the message's content. Returns None if the text is not a
    header. Unknown words are ignored, unless the text ends before the message begins: then they are
    the message."""
    header = _Header()
    marked = unknown = False
    for _ in range(_MAX_HEADER_WORDS):
        yield from reader.skip_space()
        mark = yield from reader.accept(_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _TO)
        if mark == _MESSAGE:
            header.is_complete = True
            return header
        if mark is None and not (yield from reader.peek()):
            return header if marked and not unknown else None
        if mark is None and not marked and header.recipient is None:
            return None
        marked = marked or mark not in (None, _TO)
        unknown = unknown or (mark is None and header.recipient is None)
        yield from reader.skip_space()
        word = yield from reader.match(_WORD)
        if not word and (yield from reader.peek()) != "":
            return None
        reader.take(len(word))
        if mark == _TO:
            header.recipient = word
        elif mark == _CHANNEL:
            header.channel = word
    return None


def _parse_damaged_header(reader: Reader) -> Resumable[_Header]:
    """Parses the known words of a header that does not end where its message begins."""
    header = _Header(is_complete=True)
    if (yield from reader.accept(_START)) is not None:
        yield from reader.accept(*_ROLES)
    if (yield from reader.accept(_CHANNEL)) is not None:
        header.channel = yield from reader.accept(*_CHANNELS)
    return header


def _parse_content(reader: Reader, output: OutputBuilder, on_text: OnText) -> Resumable[None]:
    """Parses up to the end of the message, or to the start of another message."""
    marks = (_START, _CHANNEL, *_ENDS)
    if (yield from reader.read_before(*marks, on_text=on_text)) is not None:
        yield from reader.accept(*_ENDS)
        output.add_marker()


def _parse_call(reader: Reader, output: OutputBuilder, name: str) -> Resumable[None]:
    output.start_tool_call(name)
    yield from parse_json_arguments(reader, output, _START, *_ENDS)
    yield from reader.accept(*_ENDS)
    output.add_marker()
