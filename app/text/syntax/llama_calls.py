"""Parses tool calls of Llama models, in all syntaxes that they use.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}
    [get_weather(city="Oslo")]
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}
    <|python_tag|>brave_search.call(query="Oslo")

Knows: the conditions for a call without the token (it must be at the start of the output and
contain the name of a tool). Must not know: which syntax a template requests.

Source: Meta's documentation of the prompts of Llama 3.1 to 4, and its chat templates. The templates
support one call per turn. Models that write several calls separate them with a semicolon, a comma
or a line break.
"""

from collections.abc import Collection, Sequence
from functools import partial

from app.core.requests import Tool
from app.text.family import ChatFamily
from app.text.syntax.json_calls import CallOutcome, parse_call_object
from app.text.syntax.marked_calls import parse_marked_call
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.python_calls import parse_python_call, parse_python_list
from app.text.syntax.reader import OnText, Reader, Resumable

PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


class LlamaFamily(ChatFamily):
    markers = (PYTHON_TAG, PYTHON_START, PYTHON_END)
    call_markers = (PYTHON_TAG, PYTHON_START)

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        if tools:
            yield from _parse_leading_calls(reader, output, {tool.name for tool in tools})
        yield from super().parse_tool_calls(reader, output, tools)

    def parse_call(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        mark: str,
        on_text: OnText,
    ) -> Resumable[bool]:
        names = {tool.name for tool in tools}
        called = yield from parse_marked_call(
            reader,
            output,
            parse=partial(_parse_tagged_call, names=names),
            open=mark,
            close=PYTHON_END,
            ends=self.call_markers,
            on_text=on_text,
        )
        if called:
            yield from _parse_leading_calls(reader, output, names)
        return called


def _parse_leading_calls(
    reader: Reader, output: OutputBuilder, names: Collection[str]
) -> Resumable[None]:
    """Parses consecutive calls."""
    while True:
        start = reader.hold()
        yield from reader.skip_space()
        yield from reader.accept(";", ",")
        outcome = yield from _parse_bare_call(reader, output, names)
        if outcome == "none":
            reader.rewind(start)
            return
        if outcome == "broken":
            yield from reader.read_before(
                PYTHON_TAG, PYTHON_START, on_text=lambda text, _: output.add_arguments(text)
            )
        output.add_marker()


def _parse_bare_call(
    reader: Reader, output: OutputBuilder, names: Collection[str]
) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    if (yield from reader.peek()) == "[":
        return (yield from parse_python_list(reader, output, names=names))
    return (yield from parse_call_object(reader, output, names=names))


def _parse_tagged_call(
    reader: Reader, output: OutputBuilder, *, names: Collection[str]
) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    match (yield from reader.peek()):
        case "{":
            return (yield from parse_call_object(reader, output))
        case "[":
            return (yield from parse_python_list(reader, output))
        case _:
            # the token may also introduce code for an interpreter
            return (
                yield from parse_python_call(reader, output, names=names, method_suffix=".call")
            )
