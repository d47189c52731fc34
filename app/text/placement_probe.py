"""Detects the positions at which a chat template keeps messages, by rendering small conversations
with a marker.

Knows: conversations with system or user messages in unusual positions. Must not know: Jinja,
tokens, model names, how messages are folded (`app/text/message_folding.py`).

Templates may drop or reject a system message after the first message, or move it to the front,
which changes the start of the prompt. Some templates treat text after tool results as a new turn,
and drop the reasoning of the current tool loop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.core.requests import Message, ToolCall
from app.text.message_folding import PlacementRules
from app.text.prompt_boundaries import common_prefix_length

Variables = Mapping[str, Any]

# a conversation and template variables → the prompt; None if the template rejects it
RenderTrial = Callable[[Sequence[Message], Variables], str | None]

# The maximum number of characters of markup around a message. Apriel's template repeats its
# instructions and all tools with each system message, so 50 turns with 28 tools would fill any
# context.
_MAX_MARKUP = 200

# the name of the tool in the calls
PROBE_TOOL_NAME = "get_weather"

_SYSTEM = Message(role="system", content="Answer-in-rhymes.")
_MARKER = Message(role="system", content="Marker-of-the-probe.")
_USER = Message(role="user", content="Question-one.")
_NEXT_USER = Message(role="user", content="Question-two.")
_ANSWER = Message(role="assistant", content="Answer-one.", reasoning="Thought-on-answer.")


def _build_call(number: int) -> tuple[Message, Message]:
    """Builds a turn with a call, and its result."""
    id = f"call_0123456789abcdef0123456{number}"
    call = ToolCall(id=id, name=PROBE_TOOL_NAME, arguments=f'{{"place": "Place-{number}"}}')
    turn = Message(
        role="assistant", content=None, reasoning=f"Thought-{number}.", tool_calls=(call,)
    )
    result = Message(
        role="tool", content=f"Result-{number}.", tool_call_id=id, name=PROBE_TOOL_NAME
    )
    return turn, result


_ROUND, _NEXT_ROUND = _build_call(1), _build_call(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """A position in a conversation. compares: whether the rest of the prompt must be the same as
    without a message at this position. A template may render the last message differently."""

    before: tuple[Message, ...]
    after: tuple[Message, ...] = ()
    compares: bool = True


_GAPS: Mapping[str, tuple[_Gap, ...]] = {
    "user": (
        _Gap(before=(_USER,)),
        _Gap(before=(_USER,), after=(_ANSWER, _NEXT_USER)),
    ),
    "assistant": (
        _Gap(before=(_USER, _ANSWER), after=(_NEXT_USER,)),
        _Gap(before=(_USER, _ANSWER), compares=False),
    ),
    "tool": (
        _Gap(before=(_USER, *_ROUND)),
        _Gap(before=(_USER, *_ROUND), after=_NEXT_ROUND),
        _Gap(before=(_USER, *_ROUND), after=(_ANSWER, _NEXT_USER)),
    ),
}

_RESULT = _ROUND[1]
_GREETING = replace(_MARKER, role="assistant")
_CALL_WITH_TEXT = replace(_ROUND[0], content=_GREETING.content)

# messages before and after a call with text
_CALL_GAPS = (
    ((_USER,), ()),
    ((_USER,), (_ANSWER,)),
    ((_USER, *_NEXT_ROUND), ()),
)

# beginnings without a user message, and text in the following part of the prompt
_BEGINNINGS = (
    (_GREETING, _USER),
    (*_ROUND,),
)

_RESULT_GAPS = (
    _Gap(before=(_USER, *_ROUND)),
    _Gap(before=(_USER, *_ROUND, *_NEXT_ROUND)),
    _Gap(before=(_USER, *_ROUND), after=_NEXT_ROUND),
)


def detect_placement(
    render: RenderTrial,
    variants: Sequence[Variables],
    *,
    system_roles: Sequence[str],
    has_system: bool,
) -> PlacementRules:
    """Detects the rules of one template. variants: template variables to test, such as reasoning on
    and off. system_roles: the roles of system messages. has_system: whether the template renders
    system messages."""
    probe = _PlacementProbe(render, variants, has_system=has_system)
    markers = [replace(_MARKER, role=role) for role in system_roles]
    keeps_text_before_calls = probe.keeps_text((_USER, _GREETING, *_ROUND), (_USER, *_ROUND))
    return PlacementRules(
        keeps_several_system=not has_system
        or all(
            probe.keeps(marker, _Gap(before=(_SYSTEM,), after=(_USER,)), heads=((),))
            for marker in markers
        ),
        keeps_system_after=frozenset(
            role
            for role, gaps in _GAPS.items()
            if all(probe.keeps_system(marker, gap) for marker in markers for gap in gaps)
        ),
        keeps_user_after_results=all(
            probe.keeps(replace(_MARKER, role="user"), gap) for gap in _RESULT_GAPS
        ),
        keeps_several_user=all(
            probe.keeps(replace(_MARKER, role="user"), gap)
            for gap in (_Gap(before=(_USER,)), _Gap(before=(_USER, _ANSWER, _NEXT_USER)))
        ),
        # the last of several messages may be merged with a call
        keeps_several_assistant=keeps_text_before_calls
        and probe.keeps_text(
            (_USER, _ANSWER, _GREETING, _NEXT_USER), (_USER, _GREETING, _NEXT_USER)
        ),
        keeps_text_before_calls=keeps_text_before_calls,
        keeps_text_of_calls=all(
            probe.keeps_text(
                (*before, _CALL_WITH_TEXT, _RESULT, *after), (*before, *_ROUND, *after)
            )
            for before, after in _CALL_GAPS
        ),
        requires_user_first=probe.requires_user_first(),
        keeps_system_in_tool_loop=not has_system or probe.keeps_system_in_tool_loop(),
    )


class _PlacementProbe:
    def __init__(
        self, render: RenderTrial, variants: Sequence[Variables], *, has_system: bool
    ) -> None:
        self._render = render
        self._variants = variants
        self._heads = ((_SYSTEM,), ()) if has_system else ((),)
        self._known: dict[tuple[int, tuple[Message, ...]], str | None] = {}

    def keeps_system(self, marker: Message, gap: _Gap) -> bool:
        """Returns whether the template keeps the marker at its position, and renders it differently
        from a user message."""
        as_user = replace(marker, role="user")
        return self.keeps(marker, gap) and all(
            self._text(variant, (*head, *gap.before, marker, *gap.after))
            != self._text(variant, (*head, *gap.before, as_user, *gap.after))
            for variant in range(len(self._variants))
            for head in self._heads
        )

    def keeps_system_in_tool_loop(self) -> bool:
        texts = [self._text(n, (_SYSTEM, _USER, *_ROUND)) for n in range(len(self._variants))]
        return all(text is None or (_SYSTEM.content or "") in text for text in texts)

    def keeps_text(self, messages: tuple[Message, ...], usual: tuple[Message, ...]) -> bool:
        """Returns whether messages are kept, with and without a system prompt. usual: messages that
        the template should support; if it does not, it is not tested."""
        return all(self._keeps_text((*head, *messages), (*head, *usual)) for head in self._heads)

    def requires_user_first(self) -> bool:
        """Returns whether messages are lost or rejected without a user message before them."""
        system = [(_SYSTEM,)] if len(self._heads) > 1 else []
        beginnings = [*system, *((*head, *rest) for head in self._heads for rest in _BEGINNINGS)]
        return not all(
            self._keeps_text(messages, _insert_user(messages)) for messages in beginnings
        )

    def _keeps_text(self, messages: tuple[Message, ...], usual: tuple[Message, ...]) -> bool:
        """Returns whether no message is lost that is in the prompt of a usual conversation. If the
        usual conversation is rejected, the template supports neither."""
        for variant in range(len(self._variants)):
            text, expected = self._text(variant, messages), self._text(variant, usual)
            words = [word for message in messages for word in _words_of(message)]
            if expected is None or not all(_word_of(message) in expected for message in usual):
                continue
            if text is None or not all(text.count(word) == 1 for word in words):
                return False
            if sorted(words, key=text.index) != words:
                return False
        return True

    def keeps(
        self, marker: Message, gap: _Gap, *, heads: Sequence[tuple[Message, ...]] | None = None
    ) -> bool:
        return all(
            self._keeps(variant, marker, replace(gap, before=(*head, *gap.before)))
            for variant in range(len(self._variants))
            for head in (self._heads if heads is None else heads)
        )

    def _keeps(self, variant: int, marker: Message, gap: _Gap) -> bool:
        text = self._text(variant, (*gap.before, marker, *gap.after))
        word = marker.content or ""
        if text is None or text.count(word) != 1:
            return False
        index = text.index(word)
        if text.find(_word_of(gap.before[-1])) not in range(index):
            return False
        if gap.after and text.find(_word_of(gap.after[0])) < index:
            return False
        if not gap.compares:
            return True
        plain = self._text(variant, (*gap.before, *gap.after))
        if plain is None or len(text) - len(plain) > len(word) + _MAX_MARKUP:
            return False
        return _is_inserted(plain, text)

    def _text(self, variant: int, messages: tuple[Message, ...]) -> str | None:
        key = variant, messages
        if key not in self._known:
            self._known[key] = self._render(messages, self._variants[variant])
        return self._known[key]


def _insert_user(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Inserts an empty user message after the system prompt."""
    head = messages[: messages[0] == _SYSTEM]
    return (*head, Message(role="user", content=""), *messages[len(head) :])


def _words_of(message: Message) -> list[str]:
    """Returns the words of a message that must be in the prompt."""
    text = [message.content] if message.content and message.tool_calls else []
    return [*text, _word_of(message)]


def _word_of(message: Message) -> str:
    """Returns a word that identifies the position of the message in the prompt."""
    if message.tool_calls:
        return message.tool_calls[0].arguments.split('"')[-2]
    return message.content or ""


def _is_inserted(plain: str, text: str) -> bool:
    """Returns whether `text` equals `plain` with one insertion."""
    head = common_prefix_length(plain, text)
    tail = common_prefix_length(plain[head:][::-1], text[head:][::-1])
    return head + tail == len(plain)
