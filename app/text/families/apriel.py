"""Apriel writes its tool calls as a JSON array between tags. Its reasoning is delimited by fixed
sentences.

    Here are my reasoning steps:
    …
    [BEGIN FINAL RESPONSE]
    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>
    [END FINAL RESPONSE]

Knows: these tags and sentences. Must not know: the parser of JSON calls, other families.

Source: ServiceNow's chat templates of Apriel 1.5 and 1.6. Their system prompts describe the format.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import ReasoningTags
from app.text.syntax.json_family import JsonFamily, JsonLayout
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALLS_END = "<tool_calls>", "</tool_calls>"
_STEPS = "Here are my reasoning steps:"
_FINAL, _FINAL_END = "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"


class Family(JsonFamily):
    def __init__(self) -> None:
        super().__init__(
            JsonLayout(before=f"{_CALLS}[", between=", ", after=f"]{_CALLS_END}"),
            template_marks=(f"{_CALLS}[", _FINAL),
            call_markers=(_CALLS,),
            call_close=_CALLS_END,
            markers=(_CALLS, _CALLS_END, _FINAL, _FINAL_END),
        )

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        return ReasoningTags(open=_STEPS, close=_FINAL)

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        output.hide(_FINAL, _FINAL_END)
        yield from super().parse_tool_calls(reader, output, tools)
