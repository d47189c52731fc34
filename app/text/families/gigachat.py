"""GigaChat 3 writes a tool call as a JSON object in a separate turn. The model starts this turn
itself.

    <|message_sep|>

    function call<|role_sep|>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}

Knows: the tokens at the beginning of a turn. Must not know: the parser of JSON calls, other
families.

Source: Sber's chat template of GigaChat 3, which supports one call per turn.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.syntax.json_calls import CallOutcome, parse_calls
from app.text.syntax.json_family import JsonFamily, JsonLayout
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_END_OF_TURN, _END_OF_ROLE = "<|message_sep|>", "<|role_sep|>"
_CALL_TURN = f"\n\nfunction call{_END_OF_ROLE}\n"


class Family(JsonFamily):
    def __init__(self) -> None:
        super().__init__(
            JsonLayout(call_before=f"{_END_OF_TURN}{_CALL_TURN}"),
            template_marks=(_END_OF_TURN, _END_OF_ROLE),
            foreign_marks=("<|function_call|>",),
            call_markers=(_END_OF_TURN,),
            markers=(_END_OF_TURN, _END_OF_ROLE),
        )

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        if (yield from reader.accept(_CALL_TURN)) is None:
            return "none"
        return (yield from parse_calls(reader, output))
