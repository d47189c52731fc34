"""The shared syntax of DeepSeek's models up to V3.1, in which tool calls are between tokens.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>…<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Knows: the parser for both forms of a call. Must not know: which form a template uses.

    get_weather<｜tool▁sep｜>{"city": "Oslo"}

    function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Oslo"}
    ```

Source: the chat templates of DeepSeek V3, R1 and V3.1.
"""

import re
from collections.abc import Sequence

from app.core.requests import Tool
from app.text.syntax.json_calls import CallOutcome, parse_json_arguments
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"

_WORD = re.compile(r"[^\s<{`]+")


class DeepSeekFamily(MarkedFamily):
    call_markers = (CALLS, CALL)
    call_close = CALLS_END
    markers = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END, "<think>", "</think>")

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from _parse_call(reader, output))


def _parse_call(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    """Parses one call and its end marker. All calls of a group begin with the same token."""
    yield from reader.skip_space()
    yield from reader.accept(CALL)
    name = yield from _parse_word(reader)
    if (yield from reader.accept(SEPARATOR)) is None:
        return "none"
    # if a name follows, the previous word was the call type
    name = (yield from _parse_word(reader)) or name
    if not name:
        return "none"
    output.start_tool_call(name)
    reader.release()
    yield from reader.skip_space()
    fenced = (yield from reader.accept(FENCE, FENCE_END)) is not None
    ends = (CALL_END, CALLS_END, CALL)
    met = yield from parse_json_arguments(reader, output, *((FENCE_END, *ends) if fenced else ends))
    if met == FENCE_END:
        yield from reader.accept(FENCE_END)
        yield from reader.skip_space()
    yield from reader.accept(CALL_END)
    return "complete"


def _parse_word(reader: Reader) -> Resumable[str]:
    word = yield from reader.match(_WORD)
    return reader.take(len(word))
