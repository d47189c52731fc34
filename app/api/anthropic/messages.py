"""Anthropic's messages: converts JSON to a conversation.

Knows: the system prompt, the order of roles, tool calls and their results, assistant prefill,
messages that later requests do not contain. Must not know: block types (content_blocks.py in the
same folder), chat templates.

System messages keep their position, so that each prompt has the previous prompt as a prefix. If a
template does not support a position, the message is folded when the prompt is built.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from app.api.anthropic.content_blocks import (
    MessageContent,
    has_tool_result,
    read_content,
    read_texts,
)
from app.api.attachments import is_new_question, peek
from app.api.fields import Fields, invalid_request, quote_value
from app.api.openai.messages import normalize_content
from app.core.requests import Conversation, Message

# The last two occur in Claude Code's requests, according to reports for other servers.
_ROLES = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "ctx": "user",
    "msg": "user",
}

# the separators between the blocks of the system prompt and between the blocks of a user message;
# the texts of an assistant message are joined without a separator
_SYSTEM_SEPARATOR, _USER_SEPARATOR = "\n\n", "\n"

# Claude Code begins its system prompt with a line such as
#     x-anthropic-billing-header: cc_version=2.1.197.a3f; cc_entrypoint=cli; cch=5e1c9;
# The value of `cch` is a checksum of the request. Including it in the prompt would prevent every
# prefix cache hit (anthropics/claude-code#68900).
_BILLING_HEADER = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(?:\n+|$)")

# the attributes of a response, which is also a message
RESPONSE_FIELDS = (
    "container",
    "context_management",
    "id",
    "model",
    "stop_details",
    "stop_reason",
    "stop_sequence",
    "type",
    "usage",
)

EFFORTS = ("low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadMessages:
    """The conversation of a request. effort: the reasoning effort that a system message sets for
    the current turn. omitted: the types of the omitted blocks, with the names used in this
    module."""

    conversation: Conversation
    effort: str | None = None
    omitted: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Turn:
    """Consecutive messages with the same role. is_temporary: see `Message`."""

    role: str
    content: MessageContent
    is_temporary: bool = False
    effort: str | None = None


def read_messages(fields: Fields) -> ReadMessages:
    """Reads `system` and `messages`. Raises AppError(INVALID)."""
    fields.required("messages")
    values = fields.array("messages")
    if not values:
        raise invalid_request("messages", "messages must contain at least one message")
    question = len(values) - 1 if is_new_question([*map(_peek_role, values)]) else None
    read = [_read_turn(value, n, omit=n != question) for n, value in enumerate(values)]
    turns = _merge(_drop_cleared(read))
    messages = _build_messages(turns)
    if not messages:
        raise invalid_request("messages", "messages must contain at least one message with content")
    last = messages[-1]
    if last.role == "assistant" and last.tool_calls:
        path = f"messages.{len(values) - 1}"
        raise invalid_request(
            path,
            f"{path}: tool_use blocks must be followed by a user message with their tool_result "
            "blocks",
        )
    return ReadMessages(
        conversation=Conversation(
            messages=(*_read_system(fields), *messages),
            continue_final=last.role == "assistant" and bool(last.content or last.reasoning),
        ),
        effort=_find_effort(turns),
        omitted=tuple(sorted({kind for turn in turns for kind in turn.content.omitted})),
    )


def _read_system(fields: Fields) -> list[Message]:
    """Reads the system prompt and removes Claude Code's billing header."""
    value = fields.value("system")
    if value is None:
        return []
    texts = read_texts(value, "system")
    if texts:
        texts[0] = strip_billing_header(texts[0])
    text = _SYSTEM_SEPARATOR.join(filter(None, texts))
    return [Message(role="system", content=text)] if text else []


def _peek_role(value: object) -> str:
    """Returns the role of a message that is not yet checked, for `is_new_question`."""
    role = _ROLES.get(str(peek(value, "role")), "")
    return "tool" if role == "user" and has_tool_result(peek(value, "content")) else role


def _read_turn(value: object, place: int, *, omit: bool) -> _Turn:
    path = f"messages.{place}"
    fields = Fields.from_value(value, path)
    role_name = fields.required_string("role")
    if role_name not in _ROLES:
        at = fields.path("role")
        raise invalid_request(
            at, f"{at} must be user, assistant or system, not {quote_value(role_name)}"
        )
    role = _ROLES[role_name]
    content = read_content(fields.value("content"), fields.path("content"), role, omit=omit)
    turn = _Turn(role=role, content=content)
    if role == "system":
        cleared = fields.one_of("clear_at", ("never", "next_user_message"))
        turn.is_temporary = cleared == "next_user_message"
        output_config = fields.nested("output_config")
        if output_config is not None:
            turn.effort = output_config.one_of("effort", EFFORTS)
    # a client may append a response to the conversation as it is
    fields.ignore_unknown(*RESPONSE_FIELDS)
    return turn


def _drop_cleared(turns: Sequence[_Turn]) -> list[_Turn]:
    """Omits temporary messages before the last user message. The client still sends them."""
    last_user = max((n for n, turn in enumerate(turns) if turn.role == "user"), default=-1)
    return [turn for n, turn in enumerate(turns) if not (turn.is_temporary and n < last_user)]


def _merge(turns: Sequence[_Turn]) -> list[_Turn]:
    """Merges consecutive messages with the same role, as Anthropic does, except for system
    messages."""
    merged: list[_Turn] = []
    for turn in turns:
        if merged and turn.role != "system" and merged[-1].role == turn.role:
            merged[-1].content.extend(turn.content)
        else:
            merged.append(turn)
    return merged


def _build_messages(turns: Sequence[_Turn]) -> list[Message]:
    messages: list[Message] = []
    waiting: set[str] = set()  # calls without a result
    for turn in turns:
        content = turn.content
        match turn.role:
            case "assistant":
                waiting = {call.id for call in content.calls}
                messages += _build_assistant(content)
            case "system":
                messages += _build_system(turn)
            case _:
                messages += _build_user(content, waiting)
    return messages


def _build_assistant(content: MessageContent) -> list[Message]:
    if not (content.texts or content.calls or content.reasoning):
        return []
    text = "".join(content.texts)
    return [
        Message(
            role="assistant",
            content=normalize_content(text, has_calls=bool(content.calls)),
            reasoning="\n".join(content.reasoning) or None,
            tool_calls=tuple(content.calls),
        )
    ]


def _build_system(turn: _Turn) -> list[Message]:
    text = _USER_SEPARATOR.join(turn.content.texts)
    return [Message(role="system", content=text, is_temporary=turn.is_temporary)] if text else []


def _build_user(content: MessageContent, waiting: set[str]) -> list[Message]:
    """Builds the messages for tool results, then the message for the text. A result that matches no
    call in `waiting` is converted to text. waiting: the IDs of calls without a result; IDs that get
    a result are removed."""
    results: list[Message] = []
    texts: list[str] = []
    for result in content.results:
        if result.tool_call_id in waiting:
            waiting.discard(result.tool_call_id)
            results.append(result)
        elif result.content:
            texts.append(f"Result of the tool call {result.tool_call_id}:\n{result.content}")
    text = _USER_SEPARATOR.join((*texts, *content.texts))
    return [*results, Message(role="user", content=text)] if text else results


def _find_effort(turns: Sequence[_Turn]) -> str | None:
    """Returns the effort set by the latest system message since the user's last text."""
    for turn in reversed(turns):
        if turn.effort is not None:
            return turn.effort
        if turn.role == "user" and turn.content.texts and not turn.content.results:
            return None
    return None


def strip_billing_header(text: str) -> str:
    """Removes the billing header from the start of a system prompt or of one of its blocks. Returns
    "" if the text has no other content."""
    return _BILLING_HEADER.sub("", text, count=1) if _BILLING_HEADER.match(text) else text
