"""The output of a model with a real chat template, as the template itself would render it.

A turn is rendered as part of a later prompt and cut out of it. Where that text does not continue
the prompt for the turn, because the template drops reasoning or opens it, the tags are added.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from app.core.errors import AppError
from app.core.requests import Message, ReasoningOptions, Tool, ToolCall
from app.text.generated_turns import OutputMeaning
from app.text.prompt import RenderedPrompt
from app.text.prompt_boundaries import common_prefix_length
from tests.text.templates import USER, build_prompt, make_prompt_builder

# words that each turn replaces by its own
THOUGHT, TEXT, PATH = "THOUGHTWORD", "TEXTWORD", "PATHWORD"
_CALL = ToolCall(id="call_0123456789abcdef01234567", name="Read", arguments=f'{{"path": "{PATH}"}}')
_RESULT = Message(role="tool", content="RESULTWORD", tool_call_id=_CALL.id)
_NEXT = replace(USER, content="RESULTWORD")

# the markup behind a turn
_MARKER = re.compile(r"\s*(<[^<>\s]{2,40}>)")

# Harmony's, which its parser removes like the markup within a turn
_CALL_END = "<|call|>"

# Kimi's models write the function into the id
_KIMI_ID = "functions.Read:0"

# the longest markup between the last word of a call and its end
_LONGEST_END = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutput:
    """call, answer: the text of a turn with a call and of a turn without. calls: whether the first
    one has a call, which it has if the template can express it. reasons: whether both contain
    reasoning. ends: the markup behind the turns."""

    call: str
    answer: str
    calls: bool
    reasons: bool
    ends: frozenset[str]


class OutputFinder:
    def __init__(self, template: str, tools: tuple[Tool, ...]) -> None:
        self._builder = make_prompt_builder(template)
        self._tools = tools
        self._begun = self._render()
        self._ends: set[str] = set()

    def find(self) -> TurnOutput:
        answer = self._find((), THOUGHT) or self._find((), None) or TEXT
        call = self._find((_CALL,), THOUGHT) or self._find((_CALL,), None)
        return TurnOutput(
            call=call or answer,
            answer=answer,
            calls=call is not None,
            reasons=THOUGHT in answer and THOUGHT in (call or answer),
            ends=frozenset(self._ends),
        )

    def _find(self, calls: tuple[ToolCall, ...], reasoning: str | None) -> str | None:
        for content in (TEXT, None) if calls else (TEXT,):
            turn = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
            for output in self._candidates(turn):
                if (found := self._cut(turn, output)) is not None:
                    return found
        return None

    def _candidates(self, turn: Message) -> Iterator[str]:
        """Texts that may begin with the turn; the rest of the later prompt follows."""
        try:
            later = self._render(turn, _RESULT if turn.tool_calls else _NEXT).text
        except AppError:
            return
        common = common_prefix_length(self._begun.text, later)
        rest = later[common:].partition("RESULTWORD")[0].replace(_CALL.id, _KIMI_ID)
        yield rest
        tags = self._begun.reasoning_tags
        if tags is not None:
            thought = turn.reasoning or ""
            opening = "" if self._begun.in_reasoning else tags.open
            yield f"{opening}{thought}{rest}"
            yield f"{opening}{thought}{tags.close}\n\n{rest}"

    def _cut(self, turn: Message, output: str) -> str | None:
        """The part of the output that means this turn, with the markup that closes it."""
        last = PATH if turn.tool_calls else TEXT
        start = output.rfind(last) + len(last)
        if start < len(last):
            return None
        limit = min(len(output), start + _LONGEST_END)
        for end in (_CALL_END, *self._ends):
            if (found := output.find(end, start, limit)) >= 0:
                limit = found
        if not turn.tool_calls:
            limit = start
        for end in range(limit, start - 1, -1):
            if self._means(turn, output[:end]):
                if marker := _MARKER.match(output, end):
                    self._ends.add(marker[1])
                return output[:end].rstrip() if turn.tool_calls else output[:end]
        return None

    def _means(self, turn: Message, output: str) -> bool:
        parser = self._begun.build_parser()
        if parser is None:
            return not turn.tool_calls and not turn.reasoning and output.strip() == turn.content
        try:
            found = OutputMeaning.of([*parser.feed(output), *parser.flush()])
        except AppError:
            return False
        calls = [(name, arguments) for name, _, arguments in found.calls]
        return (
            found.reasoning == (turn.reasoning or "")
            and found.content == (turn.content or "")
            and calls == [(call.name, call.arguments) for call in turn.tool_calls]
        )

    def _render(self, *later: Message) -> RenderedPrompt:
        reasoning = ReasoningOptions(enabled=True, lenient=True)
        return build_prompt(self._builder, USER, *later, tools=self._tools, reasoning=reasoning)
