"""Finds boundaries in a rendered prompt: the ends of messages, and the point at which the output
continues.

Knows: how to render parts of a conversation and compare them with the prompt. Must not know: Jinja,
tokens, the prefix cache.

A template may render a message differently when other messages follow. A boundary is therefore
defined as the end of the common prefix of two renders, rather than the position of a marker such as
<|im_end|>.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Protocol

from app.core.errors import AppError, ErrorKind
from app.core.requests import Message, ToolCall
from app.text.message_folding import SYSTEM_ROLES

# a private-use character, which templates do not treat specially and normal text does not contain
_MARK = "\uf8f0"

# messages that may follow a prompt; some templates change the preceding text
_ANSWERS = (
    Message(role="assistant", content=_MARK),
    Message(
        role="assistant",
        content=None,
        tool_calls=(ToolCall(id="call_0123456789abcdef01234567", name=_MARK, arguments="{}"),),
    ),
)


class RenderPart(Protocol):
    """The signature of `ConversationRenderer.render_part`."""

    def __call__(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str: ...


def find_message_ends(
    render: RenderPart,
    fold: Callable[[Sequence[Message]], Sequence[Message]],
    conversation: Sequence[Message],
    prompt: str,
) -> tuple[int, ...]:
    """Returns the positions in the prompt at which other prompts are likely to diverge, in
    ascending order: the start and end of the last user message, the end of the system prompt, the
    end of the last message, and the start of trailing temporary messages. Positions that cannot be
    determined are omitted. render, fold: the methods of the conversation's
    `ConversationRenderer`."""
    messages = fold(conversation)
    if not messages:
        return ()
    finder = _BoundaryFinder(render, prompt)
    lasting = len(conversation)
    while lasting and conversation[lasting - 1].is_temporary:
        lasting -= 1
    if 0 < lasting < len(conversation):
        finder.add_end_of(fold(conversation[:lasting]))
    start = len(_get_system_prompt(messages))
    finder.add_end_of([*messages[:start], Message(role="user", content=_MARK)])
    finder.add_last_message(messages)
    last_user = max((n for n, m in enumerate(messages) if m.role == "user"), default=0)
    if last_user:
        finder.add_user_message(messages[: last_user + 1])
    return finder.get_positions()


def _get_system_prompt(messages: Sequence[Message]) -> list[Message]:
    """Returns the leading system messages."""
    return list(takewhile(lambda message: message.role in SYSTEM_ROLES, messages))


class _BoundaryFinder:
    def __init__(self, render: RenderPart, prompt: str) -> None:
        self._render = render
        self._prompt = prompt
        self._positions: set[int] = set()

    def get_positions(self) -> tuple[int, ...]:
        return tuple(sorted(position for position in self._positions if position > 0))

    def add_end_of(self, messages: Sequence[Message]) -> None:
        """Adds the end of the common prefix of the prompt and a render of only these messages."""
        text = self._try(messages, add_generation_prompt=False)
        self._positions.add(common_prefix_length(text, self._prompt))

    def add_last_message(self, messages: Sequence[Message]) -> None:
        """Adds the start of the generation prompt, and the position from which an assistant message
        changes the text, if that is earlier. Both are computed from a short conversation with the
        same last messages, which is faster to render. It has a system prompt if the conversation
        has one, because some templates inspect a different message in this case."""
        system = [replace(message, content=_MARK) for message in _get_system_prompt(messages)]
        short = messages[-1:]
        if short[0].role != "user":
            answers = (n for n, message in enumerate(messages) if message.role == "assistant")
            start = max(answers, default=len(messages) - 1)
            short = [Message(role="user", content=_MARK), *messages[start:]]
        if len(system) < len(messages):
            short = [*system, *short]
        text = self._try(short)
        without = self._try(short, add_generation_prompt=False)
        end = common_prefix_length(text, without)
        if not text or not self._prompt.endswith(text[end:]):
            self.add_end_of(messages)
            return
        lengths = {end}
        for answer in _ANSWERS:
            answered = self._try([*short, answer], add_generation_prompt=False)
            lengths.add(min(end, common_prefix_length(text, answered) if answered else end))
        for length in lengths:
            if self._prompt.endswith(text[length:]):
                self._positions.add(len(self._prompt) - len(text) + length)

    def add_user_message(self, messages: Sequence[Message]) -> None:
        """Adds the start and end of the last of these messages. If the template renders the system
        prompt and the tools within this message, they come after the start."""
        text = self._try(messages, add_generation_prompt=False)
        common = common_prefix_length(text, self._prompt)
        self._positions.add(common)
        if common < len(text):
            return
        start = self._find_start(text, messages[-1:])
        system = _get_system_prompt(messages)
        content = (system[-1].content or "").strip() if system else ""
        if content and text[:start].rstrip().endswith(content):
            start = self._find_start(text, [*system, messages[-1]])
        if start > 0:
            self._positions.add(start)

    def _find_start(self, text: str, messages: Sequence[Message]) -> int:
        """Returns the position at which the text ends if only these messages are rendered."""
        rendered = self._try(messages, add_generation_prompt=False)
        return len(text) - common_prefix_length(text[::-1], rendered[::-1])

    def _try(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Renders messages. Returns "" if the template rejects them."""
        try:
            return self._render(messages, add_generation_prompt=add_generation_prompt)
        except AppError:
            return ""


def common_prefix_length(a: str, b: str) -> int:
    """Returns the length of the common prefix. Uses bisection, because comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def render_to_continue(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], *, param: str
) -> str:
    """Renders a conversation up to the end of its last message, which the output continues: the
    content of an assistant message without calls, or its reasoning if it has no content. render:
    renders folded messages without a generation prompt.

    Raises AppError(INVALID) if the last message cannot be continued, or if the template does not
    render its text unchanged."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls:
        message = "only an assistant message without tool calls can be continued"
        raise AppError(ErrorKind.INVALID, message, param=param)
    mark = _MARK
    while any(mark in (m.content or "") + (m.reasoning or "") for m in messages):
        mark += _MARK
    field = "reasoning" if last.reasoning and not last.content else "content"
    text_to_continue = (last.reasoning if field == "reasoning" else last.content) or ""
    text = render([*messages[:-1], replace(last, **{field: text_to_continue + mark})])
    start, has_mark, _ = text.partition(mark)
    if not has_mark or not start.endswith(text_to_continue):
        message = (
            f"the model's chat template does not render the {field} of the last message unchanged, "
            "so it cannot be continued: send a user message instead"
        )
        raise AppError(ErrorKind.INVALID, message, param=param)
    return start
