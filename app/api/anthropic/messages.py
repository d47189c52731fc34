"""Anthropic's messages: converts their structs to a conversation.

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
    build_content,
    build_texts,
    has_tool_result,
)
from app.api.fields import invalid_request
from app.api.openai.chat import is_new_question, normalize_content
from app.api.schema.anthropic import AnthropicMessage, MessagesBody
from app.core.images import ContentPart, join_parts, split_parts
from app.core.requests import Conversation, Message

# the separators between the blocks of the system prompt and between the blocks of a user message;
# the texts of an assistant message are joined without a separator
_SYSTEM_SEPARATOR, _USER_SEPARATOR = "\n\n", "\n"

# Claude Code begins its system prompt with a line such as
#     x-anthropic-billing-header: cc_version=2.1.197.a3f; cc_entrypoint=cli; cch=5e1c9;
# The value of `cch` is a checksum of the request. Including it in the prompt would prevent every
# prefix cache hit (anthropics/claude-code#68900).
_BILLING_HEADER = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(?:\n+|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHistory:
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


def build_messages(body: MessagesBody) -> MessageHistory:
    """Converts `system` and `messages`. Raises AppError(INVALID)."""
    roles = [
        "tool" if _get_role(one) == "user" and has_tool_result(one.content) else _get_role(one)
        for one in body.messages
    ]
    question = len(roles) - 1 if is_new_question(roles) else None
    read = [
        _build_turn(message, f"messages.{index}", omit=index != question)
        for index, message in enumerate(body.messages)
    ]
    turns = _merge(_drop_cleared(read))
    messages = _build_messages(turns)
    if not messages:
        raise invalid_request("messages", "messages must contain at least one message with content")
    last = messages[-1]
    if last.role == "assistant" and last.tool_calls:
        path = f"messages.{len(roles) - 1}"
        raise invalid_request(
            path,
            f"{path}: tool_use blocks must be followed by a user message with their tool_result "
            "blocks",
        )
    return MessageHistory(
        conversation=Conversation(
            messages=(*_build_system_prompt(body), *messages),
            continue_final=last.role == "assistant" and bool(last.content or last.reasoning),
        ),
        effort=_find_effort(turns),
        omitted=tuple(sorted({kind for turn in turns for kind in turn.content.omitted})),
    )


def _build_system_prompt(body: MessagesBody) -> list[Message]:
    """Converts the system prompt, without Claude Code's billing header."""
    texts = build_texts(body.system, "system")
    if texts:
        texts[0] = strip_billing_header(texts[0])
    text = _SYSTEM_SEPARATOR.join(filter(None, texts))
    return [Message(role="system", content=text)] if text else []


def _get_role(message: AnthropicMessage) -> str:
    return "user" if message.role in ("ctx", "msg") else message.role


def _build_turn(message: AnthropicMessage, path: str, *, omit: bool) -> _Turn:
    role = _get_role(message)
    content = build_content(message.content, f"{path}.content", role, omit=omit)
    turn = _Turn(role=role, content=content)
    if role == "system":
        turn.is_temporary = message.clear_at == "next_user_message"
        turn.effort = None if message.output_config is None else message.output_config.effort
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
    if not (content.parts or content.calls or content.reasoning):
        return []
    text, _ = join_parts(content.parts, "")  # these messages have no images
    return [
        Message(
            role="assistant",
            content=normalize_content(text, has_calls=bool(content.calls)),
            reasoning="\n".join(content.reasoning) or None,
            tool_calls=tuple(content.calls),
        )
    ]


def _build_system(turn: _Turn) -> list[Message]:
    text, _ = join_parts(turn.content.parts, _USER_SEPARATOR)
    return [Message(role="system", content=text, is_temporary=turn.is_temporary)] if text else []


def _build_user(content: MessageContent, waiting: set[str]) -> list[Message]:
    """Builds the messages for tool results, then the message for the text. A result that matches no
    call in `waiting` is converted to text. waiting: the IDs of calls without a result; IDs that get
    a result are removed."""
    results: list[Message] = []
    parts: list[ContentPart] = []
    for result in content.results:
        if result.tool_call_id in waiting:
            waiting.discard(result.tool_call_id)
            results.append(result)
        elif result.content or result.images:
            head = f"Result of the tool call {result.tool_call_id}:\n"
            found = (head, *split_parts(result.content, result.images))
            parts += split_parts(*join_parts(found, ""))
    text, images = join_parts((*parts, *content.parts), _USER_SEPARATOR)
    if not (text or images):
        return results
    return [*results, Message(role="user", content=text, images=images)]


def _find_effort(turns: Sequence[_Turn]) -> str | None:
    """Returns the effort set by the latest system message since the user's last text."""
    for turn in reversed(turns):
        if turn.effort is not None:
            return turn.effort
        if turn.role == "user" and turn.content.parts and not turn.content.results:
            return None
    return None


def strip_billing_header(text: str) -> str:
    """Removes the billing header from the start of a system prompt or of one of its blocks. Returns
    "" if the text has no other content."""
    return _BILLING_HEADER.sub("", text, count=1) if _BILLING_HEADER.match(text) else text
