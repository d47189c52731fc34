"""Folding: joins a message to an adjacent one if the chat template would drop, reject or move it.

Knows: the roles of messages, the positions at which a template keeps them (`PlacementRules`). Must
not know: Jinja, how the rules are detected (`app/text/placement_probe.py`), dialects.

The result depends only on the messages up to the assistant's next turn. Later turns of the same
conversation are therefore folded consistently, and each prompt is a prefix of the next prompt:

    system          at the start             → one system message
    system          after a user message     → the end of that message
    system          after results of calls   → the end of the last result
    system          after the assistant      → the start of the next user message, else a new one
    user            after results of calls   → the end of the last result
    assistant       after an assistant       → one message
    an empty user   before the assistant     → if the template requires a user message first
    anything        between call and result  → after the results

One rule, `keeps_system_in_tool_loop`, depends on later messages, because the templates that require
it do so as well.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from app.core.requests import Message, join_contents, prepend_text

SYSTEM_ROLES = ("system", "developer")

# the separator between joined texts: a blank line
_SEPARATOR = "\n\n"

_ERROR_PREFIX = "Error: "


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """The positions at which a template keeps messages.

    keeps_several_system: whether several system messages at the start are kept. keeps_system_after:
    the roles ("user", "assistant", "tool") after which a system message keeps its position.
    keeps_user_after_results: whether a user message directly after tool results leaves the current
    tool loop and its reasoning unchanged. keeps_several_user, keeps_several_assistant: whether
    consecutive messages without calls are kept. keeps_text_before_calls: whether an assistant
    message directly before a message with calls is kept. keeps_text_of_calls: whether the text of a
    message with calls is kept. requires_user_first: whether the first message after the system
    prompt must be a user message. keeps_system_in_tool_loop: whether the system prompt is kept if
    the last message is a tool result. Some templates render the system prompt only before a user
    message at the end of the conversation.
    """

    keeps_several_system: bool = True
    keeps_system_after: frozenset[str] = frozenset({"user", "assistant", "tool"})
    keeps_user_after_results: bool = True
    keeps_several_user: bool = True
    keeps_several_assistant: bool = True
    keeps_text_before_calls: bool = True
    keeps_text_of_calls: bool = True
    requires_user_first: bool = False
    keeps_system_in_tool_loop: bool = True


def fold_messages(messages: Sequence[Message], rules: PlacementRules) -> list[Message]:
    """Folds messages that the template would not keep, without losing text. The order of the text
    is preserved, except that results directly follow their calls."""
    at_start = next(
        (n for n, message in enumerate(messages) if message.role not in SYSTEM_ROLES), len(messages)
    )
    folder = _MessageFolder(rules, _merge_system(messages[:at_start], rules))
    rest = messages[at_start:]
    if rules.requires_user_first and messages and (not rest or rest[0].role != "user"):
        folder.add(Message(role="user", content=""))
    for message in _move_results_to_calls(messages[at_start:]):
        folder.add(message)
    folded = folder.finish()
    return folded if rules.keeps_system_in_tool_loop else _move_system_to_last_user(folded)


def _merge_system(messages: Sequence[Message], rules: PlacementRules) -> list[Message]:
    if rules.keeps_several_system or len(messages) < 2:
        return list(messages)
    return [_join_to(messages[0], messages)]


def _move_system_to_last_user(messages: list[Message]) -> list[Message]:
    """Moves the system prompt before the last user message, like such a template does."""
    last = max((n for n, message in enumerate(messages) if message.role == "user"), default=0)
    if messages[-1].role == "user" or last == 0 or messages[0].role not in SYSTEM_ROLES:
        return messages
    joined = _join_to(messages[last], (messages[0], messages[last]))
    return [*messages[1:last], joined, *messages[last + 1 :]]


def _move_results_to_calls(messages: Sequence[Message]) -> Iterable[Message]:
    """Moves tool results directly after their calls, before other messages."""
    after_calls: list[Message] = []
    has_calls = False
    for message in messages:
        if message.role == "tool" or (message.role != "assistant" and not has_calls):
            yield message
        elif message.role == "assistant":
            yield from after_calls
            after_calls.clear()
            has_calls = bool(message.tool_calls)
            yield message
        else:
            after_calls.append(message)
    yield from after_calls


class _MessageFolder:
    """Folds messages one by one. place: the role of the last message that is not a system
    message."""

    def __init__(self, rules: PlacementRules, start: list[Message]) -> None:
        self._rules = rules
        self._messages = start
        self._place = ""
        # system messages for the start of the next user message
        self._before_user: list[Message] = []

    def add(self, message: Message) -> None:
        if message.role in SYSTEM_ROLES:
            self._add_system(message)
        elif message.role == "user":
            self._add_user(message)
        else:
            self._add_user_for_system()
            for part in self._split(message):
                if part.role == "assistant" == self._place and not self._keeps_assistant(part):
                    self._merge_assistant(part)
                else:
                    self._append(_mark_error(part))

    def finish(self) -> list[Message]:
        self._add_user_for_system()
        return self._messages

    def _add_system(self, message: Message) -> None:
        if self._place in self._rules.keeps_system_after:
            self._messages.append(message)
        elif not (message.content or message.images):
            return
        elif self._place == "assistant":
            self._before_user.append(message)
        else:
            self._join_to_last(message)

    def _add_user(self, message: Message) -> None:
        if self._before_user:
            joined = _join_to(message, (*self._before_user, message))
            self._before_user.clear()
            self._append(joined)
        elif self._keeps_user:
            self._append(message)
        else:
            self._join_to_last(message)

    @property
    def _keeps_user(self) -> bool:
        match self._place:
            case "tool":
                return self._rules.keeps_user_after_results
            case "user":
                return self._rules.keeps_several_user
            case _:
                return True

    def _split(self, message: Message) -> Sequence[Message]:
        """Separates calls from the text before them if the template would drop the text."""
        rules = self._rules
        if rules.keeps_text_of_calls or not rules.keeps_text_before_calls:
            return (message,)
        if not (message.tool_calls and message.content):
            return (message,)
        calls = replace(message, content=None, images=(), reasoning=None)
        return (replace(message, tool_calls=()), calls)

    def _keeps_assistant(self, message: Message) -> bool:
        last = self._messages[-1]
        if last.role in SYSTEM_ROLES:  # at its position, it separates the messages
            return True
        if message.tool_calls and not last.tool_calls:
            return self._rules.keeps_text_before_calls
        return self._rules.keeps_several_assistant

    def _merge_assistant(self, message: Message) -> None:
        last = self._messages[-1]
        content, images = join_contents((last, message), _SEPARATOR)
        reasoning = _SEPARATOR.join(filter(None, (last.reasoning, message.reasoning)))
        self._messages[-1] = replace(
            last,
            content=content or None,
            images=images,
            reasoning=reasoning or None,
            tool_calls=(*last.tool_calls, *message.tool_calls),
        )

    def _add_user_for_system(self) -> None:
        if self._before_user:
            self._append(_join_to(Message(role="user", content=None), self._before_user))
            self._before_user.clear()

    def _append(self, message: Message) -> None:
        self._messages.append(message)
        self._place = message.role

    def _join_to_last(self, message: Message) -> None:
        """Joins the content of a message to the last one that is not a system message. System
        messages after it are joined first, to preserve the order."""
        added = [message]
        while self._messages[-1].role in SYSTEM_ROLES:
            added.insert(0, self._messages.pop())
        last = self._messages[-1]
        self._messages[-1] = _join_to(last, (last, *added))


def _mark_error(message: Message) -> Message:
    """Marks the result of a failed call in its text, because templates do not render `is_error`."""
    text = message.content or ""
    if not message.is_error or text.lower().startswith("error"):
        return message
    return prepend_text(message, _ERROR_PREFIX)


def _join_to(message: Message, messages: Iterable[Message]) -> Message:
    """Returns a message with the joined contents of others."""
    content, images = join_contents(messages, _SEPARATOR)
    return replace(message, content=content, images=images)
