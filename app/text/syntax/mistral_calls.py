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
from app.text.syntax.json_calls import CallOutcome, parse_calls
from app.text.syntax.json_reader import parse_json_to_own_bracket
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINK, THINK_END = "[THINK]", "[/THINK]"

# the ID format required by the templates: nine letters or digits
ID_PATTERN = "[a-zA-Z0-9]{9}"

_WORD = re.compile(r"[^\s\[\]{}\"]+")
_ID_CHARACTERS = string.ascii_letters + string.digits


class MistralFamily(MarkedFamily):
    call_markers = (CALLS,)
    markers = (CALLS, CALL_ID, ARGUMENTS, THINK, THINK_END)

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        if THINK in template:
            return ReasoningTags(open=THINK, close=THINK_END)
        return super().reasoning_tags(template)

    def make_call_id(self, index: int) -> str | None:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    def parse_output(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        tags: ReasoningTags | None,
        *,
        in_reasoning: bool,
    ) -> Resumable[None]:
        """Parses text, calls and reasoning in any order."""
        if tags is None:
            yield from self.parse_tool_calls(reader, output, tools)
            return
        yield from self.parse_reasoning(reader, output, tools, tags, in_reasoning=in_reasoning)
        marks = (tags.open, *(self.call_markers if tools else ()))
        while mark := (yield from reader.read_until(*marks, on_text=output.add_content)):
            if mark == tags.open:
                output.add_marker()
                yield from self.parse_thoughts(reader, output, tools, tags.open, tags.close)
            else:
                yield from self.parse_call(reader, output, tools, mark, output.add_content)

    def parse_marked(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[CallOutcome]:
        return (yield from _parse_calls(reader, output))


def _parse_calls(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    if (yield from reader.peek()) in ("[", "{"):
        return (yield from parse_calls(reader, output))
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
    end = yield from parse_json_to_own_bracket(reader, lambda text, _: output.add_arguments(text))
    return "complete" if end == "complete" else "broken"


def _parse_word(reader: Reader) -> Resumable[str]:
    word = yield from reader.match(_WORD)
    return reader.take(len(word))
