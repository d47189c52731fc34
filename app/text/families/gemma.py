"""FunctionGemma and Gemma 4 write tool calls in Gemma's notation, between tags. Gemma 4 writes
reasoning in channels, which may occur at any position.

    <start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>

    <|channel>thought
    I think…<channel|><|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_response>

Knows: these tokens, the label of a reasoning channel. Must not know: the parser of the notation
(`app/text/syntax/gemma_calls.py`).

Sources: Google's documentation of FunctionGemma's formatting and of Gemma 4's prompt format, and
the chat template of Gemma 4.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.syntax.gemma_calls import GemmaCallParser, build_gemma_grammar
from app.text.syntax.json_calls import CallOutcome
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CHANNEL, _CHANNEL_END = "<|channel>", "<channel|>"
_LABEL = "thought"

# the marker before the results, which usually ends the output
_RESPONSE = "<|tool_response>"


class _GemmaFamily(MarkedFamily):
    """open, close: the tags around a call. quote: the token around strings."""

    open: str
    close: str
    quote: str

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        calls = GemmaCallParser(quote=self.quote, close=self.close, tools=tools)
        return (yield from calls.parse(reader, output))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return build_gemma_grammar(
            tools,
            literal,
            json_schema,
            open=self.open,
            close=self.close,
            quote=self.quote,
        )


class _FunctionGemma(_GemmaFamily):
    open, close, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    template_marks = call_markers = (open,)
    call_close = close
    markers = (open, close, quote)


class _Gemma4(_GemmaFamily):
    open, close, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    template_marks = (f"{open}call:",)
    call_markers = (open,)
    call_close = close
    markers = (open, close, quote, _CHANNEL, _CHANNEL_END, _RESPONSE)

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        if _CHANNEL not in template:
            return None
        return ReasoningTags(open=f"{_CHANNEL}{_LABEL}\n", close=_CHANNEL_END)

    def ends_in_reasoning(self, prompt: str, tags: ReasoningTags) -> bool:
        return prompt.endswith((tags.open, tags.open.rstrip()))

    def parse_reasoning(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        tags: ReasoningTags,
        *,
        in_reasoning: bool,
    ) -> Resumable[None]:
        """Parses only reasoning that was opened by the prompt. All other reasoning is in channels,
        which may occur at any position. All channels contain reasoning."""
        if in_reasoning:
            output.add_marker()
            yield from self.parse_thoughts(reader, output, tools, _CHANNEL, _CHANNEL_END)

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        marks = (_CHANNEL, *(self.call_markers if tools else ()))
        while mark := (yield from reader.read_until(*marks, on_text=output.add_content)):
            if mark == _CHANNEL:
                output.add_marker()
                yield from _skip_label(reader)
                yield from self.parse_thoughts(reader, output, tools, _CHANNEL, _CHANNEL_END)
            else:
                yield from self.parse_call(reader, output, tools, mark, output.add_content)


FAMILIES = {"function_gemma": _FunctionGemma(), "gemma4": _Gemma4()}


def _skip_label(reader: Reader) -> Resumable[None]:
    """Skips the name of the channel, which is not part of the reasoning."""
    start = reader.hold()
    yield from reader.skip_space()
    labeled = (yield from reader.accept(_LABEL)) is not None
    character = yield from reader.peek()
    if not labeled or not (character.isspace() or character in ("", "<")):
        reader.rewind(start)
    reader.release()
