"""The shared parser for all call syntaxes of Mistral's models.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "…"}]
    [TOOL_CALLS]get_weather[CALL_ID]…[ARGS]{"city": "Oslo"}
    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}

Knows: the parser for each syntax, reasoning at any position, the format of call IDs. Must not know:
which syntax a template uses, because a model that was trained on one syntax sometimes writes
another.

Source: mistral-common's tokenizers v3, v11 and v13, and Mistral's chat templates. An ID after the
arguments is ignored, because the start of the call was already sent.
"""

import re
import secrets
import string
from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import ReasoningTags
from app.text.family import ChatFamily
from app.text.syntax.json_calls import CallOutcome, parse_call_list
from app.text.syntax.json_reader import parse_json_value
from app.text.syntax.marked_calls import parse_marked_call
from app.text.syntax.output_parser import OutputBuilder, OutputParser
from app.text.syntax.reader import Reader, Resumable

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINK, THINK_END = "[THINK]", "[/THINK]"

# the ID format required by the templates: nine letters or digits
ID_PATTERN = "[a-zA-Z0-9]{9}"

_WORD = re.compile(r"[^\s\[\]{}\"]+")
_ID_CHARACTERS = string.ascii_letters + string.digits


class MistralFamily(ChatFamily):
    markers = (CALLS, CALL_ID, ARGUMENTS, THINK, THINK_END)

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        if THINK in template:
            return ReasoningTags(open=THINK, close=THINK_END)
        return super().reasoning_tags(template)

    def make_call_id(self, index: int) -> str | None:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    def build_parser(
        self, *, tools: Sequence[Tool], tags: ReasoningTags | None, in_reasoning: bool
    ) -> OutputParser:
        def parse(reader: Reader, output: OutputBuilder) -> Resumable[None]:
            if tags is not None:
                yield from self.parse_reasoning(reader, output, tags, in_reasoning=in_reasoning)
            yield from _parse_interleaved(reader, output, tools, tags)

        return OutputParser(parse)


def _parse_interleaved(
    reader: Reader, output: OutputBuilder, tools: Sequence[Tool], tags: ReasoningTags | None
) -> Resumable[None]:
    """Parses text, calls and reasoning in any order. A call within reasoning is not parsed."""
    calls = (CALLS,) if tools else ()
    marks = calls if tags is None else (*calls, tags.open)
    while (mark := (yield from reader.read_until(*marks, on_text=output.add_content))) is not None:
        if tags is None or mark == CALLS:
            yield from parse_marked_call(reader, output, parse=_parse_calls, open=mark, ends=marks)
            continue
        output.add_marker()
        if (yield from reader.read_until(tags.close, on_text=output.add_reasoning)) is not None:
            output.add_marker()


def _parse_calls(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    if (yield from reader.peek()) == "[":
        return (yield from parse_call_list(reader, output))
    name = yield from _parse_word(reader)
    id = None
    if (yield from reader.accept(CALL_ID)) is not None:
        id = yield from _parse_word(reader)
    # if the token is hidden, the braces identify the arguments
    begins = (yield from reader.accept(ARGUMENTS)) is not None
    if not name or not (begins or (yield from reader.peek()) == "{"):
        return "none"
    output.start_tool_call(name, id or None)
    reader.release()
    end = yield from parse_json_value(reader, lambda text, _: output.add_arguments(text))
    return "complete" if end == "complete" else "broken"


def _parse_word(reader: Reader) -> Resumable[str]:
    word = yield from reader.match(_WORD)
    return reader.take(len(word))
