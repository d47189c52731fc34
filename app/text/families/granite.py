"""Granite writes its tool calls as a token, followed by a JSON array.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]

If reasoning is enabled, the response is between tags too: `<think>…</think>` is followed by
`<response>…</response>`.

Knows: the token of each version. Must not know: the parser of JSON calls, other families.

Source: IBM's chat templates of Granite 3.0 to 3.3. Granite 3.1 writes `<tool_call>` instead of the
token.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.syntax.json_family import JsonFamily, JsonLayout
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALLS_IN_LETTERS = "<|tool_call|>", "<tool_call>"
_RESPONSE, _RESPONSE_END = "<response>", "</response>"


class Family(JsonFamily):
    def __init__(self) -> None:
        super().__init__(
            JsonLayout(before=f"{_CALLS}[", between=", ", after="]"),
            template_marks=(_CALLS, "<|start_of_role|>"),
            call_markers=(_CALLS, _CALLS_IN_LETTERS),
            markers=(_CALLS,),
        )

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        if reader.at:  # after reasoning
            yield from reader.skip_space()
            if (yield from reader.accept(_RESPONSE)) is not None:
                output.add_marker()
                output.hide(_RESPONSE_END)
        yield from super().parse_tool_calls(reader, output, tools)
