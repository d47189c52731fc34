"""Mistral's models write tool calls after a token, in one of three syntaxes.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "…"}]
    [TOOL_CALLS]get_weather[CALL_ID]…[ARGS]{"city": "Oslo"}
    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}

One parser reads all three, because a model that was trained on one syntax sometimes writes another.

Knows: these tokens, reasoning at any position, the format of call IDs. Must not know: the parser of
JSON calls.

Source: mistral-common's tokenizers v3, v11 and v13, and Mistral's chat templates. An ID after the
arguments is ignored, because the start of the call was already sent. SentencePiece tokenizers put a
space before the array.
"""

import json as jsons
import re
import secrets
import string
from collections.abc import Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.syntax.json_calls import CallOutcome, parse_calls
from app.text.syntax.json_reader import parse_json_to_own_bracket
from app.text.syntax.marked_calls import MarkedFamily
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable

_CALLS, _CALL_ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_THINK, _THINK_END = "[THINK]", "[/THINK]"

# the ID format required by the templates: nine letters or digits
_ID_PATTERN = "[a-zA-Z0-9]{9}"

_WORD = re.compile(r"[^\s\[\]{}\"]+")
_ID_CHARACTERS = string.ascii_letters + string.digits


class _MistralFamily(MarkedFamily):
    call_markers = (_CALLS,)
    markers = (_CALLS, _CALL_ID, _ARGUMENTS, _THINK, _THINK_END)

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        if _THINK in template:
            return ReasoningTags(open=_THINK, close=_THINK_END)
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


class _MistralV3(_MistralFamily):
    """Up to Small 3.1: a JSON array. The ID may be missing."""

    template_marks = (_CALLS,)
    foreign_marks = (_ARGUMENTS,)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        before_id, behind_id = literal(', "id": "'), literal('"')
        id = f"({before_id} /{_ID_PATTERN}/ {behind_id})?"
        return ToolCallGrammar(
            before=f"{literal(_CALLS)} ({literal(' ')})? {literal('[')}",
            calls=tuple(
                f"{literal(_build_call_prefix(tool.name))} {json_schema(tool)} {id} {literal('}')}"
                for tool in tools
            ),
            between=literal(", "),
            after=literal("]"),
            trigger=_CALLS,
        )


class _MistralV11(_MistralFamily):
    """Small 3.2 and Magistral 2506: a name, an ID and JSON."""

    template_marks = (_CALLS, _CALL_ID, _ARGUMENTS)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            calls=tuple(
                " ".join(
                    (
                        literal(f"{_CALLS}{tool.name}{_CALL_ID}"),
                        f"/{_ID_PATTERN}/",
                        literal(_ARGUMENTS),
                        json_schema(tool),
                    )
                )
                for tool in tools
            ),
            between="",
            trigger=_CALLS,
        )


class _MistralV13(_MistralFamily):
    """Since Devstral 2507: a name and JSON."""

    template_marks = (_CALLS, _ARGUMENTS)
    foreign_marks = (_CALL_ID,)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            calls=tuple(
                f"{literal(f'{_CALLS}{tool.name}{_ARGUMENTS}')} {json_schema(tool)}"
                for tool in tools
            ),
            between="",
            trigger=_CALLS,
        )


FAMILIES = {"mistral_v3": _MistralV3(), "mistral_v11": _MistralV11(), "mistral_v13": _MistralV13()}


def _parse_calls(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    if (yield from reader.peek()) in ("[", "{"):
        return (yield from parse_calls(reader, output))
    name = yield from _parse_word(reader)
    id = None
    if (yield from reader.accept(_CALL_ID)) is not None:
        id = yield from _parse_word(reader)
    # if the token is hidden, the braces identify the arguments
    begins = (yield from reader.accept(_ARGUMENTS)) is not None
    if not name or not (begins or (yield from reader.peek()) == "{"):
        return "none"
    output.start_tool_call(name, id or None)
    reader.release()
    end = yield from parse_json_to_own_bracket(reader, lambda text, _: output.add_arguments(text))
    return "complete" if end == "complete" else "broken"


def _parse_word(reader: Reader) -> Resumable[str]:
    word = yield from reader.match(_WORD)
    return reader.take(len(word))


def _build_call_prefix(name: str) -> str:
    return f'{{"name": {jsons.dumps(name, ensure_ascii=False)}, "arguments": '
