"""Items of /v1/responses → the turns of a conversation.

Knows items in their one form, of a request and of responses that were kept alike. Must not know:
where they come from, chat templates.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from app.api.dialects.openai_arguments import normalize_arguments
from app.api.wire import JsonObject
from app.core.requests import Message, ToolCall


@dataclass(slots=True)
class _AssistantTurn:
    """What the assistant says between two others. It thinks, speaks and calls, in any order and as
    often as it likes; templates know one of each, in this order."""

    reasoning: list[str] = field(default_factory=list[str])
    content: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def message(self) -> Message | None:
        if not (self.reasoning or self.content or self.calls):
            return None
        return Message(
            role="assistant",
            content="\n".join(self.content) if self.content else None,
            reasoning="\n".join(self.reasoning) if self.reasoning else None,
            tool_calls=tuple(self.calls),
        )


def build_messages(items: Iterable[JsonObject]) -> tuple[Message, ...]:
    """Items in their one form → the turns of a conversation. A call that was cut off was never
    made, and is left out. Raises AppError(INVALID) for an earlier call that the model got wrong."""
    messages: list[Message | None] = []
    names: dict[str, str] = {}
    turn = _AssistantTurn()
    for item in items:
        match item["type"], item.get("role"):
            case "reasoning", _:
                turn.reasoning += [part["text"] for part in item["content"]]
                continue
            case "message", "assistant":
                turn.content.append(_join_text(item["content"]))
                continue
            case "function_call", _:
                names[item["call_id"]] = item["name"]
                if item["status"] != "incomplete":
                    turn.calls.append(_to_tool_call(item))
                continue
            case _:
                messages.append(turn.message())
                turn = _AssistantTurn()
        messages.append(_to_message(item, names))
    messages.append(turn.message())
    return tuple(message for message in messages if message is not None)


def prepend_instructions(
    instructions: str | None, messages: tuple[Message, ...]
) -> tuple[Message, ...]:
    """Instructions stand before everything else. Many templates take one system message, at the
    very beginning: what the conversation itself begins with joins it."""
    if instructions is None:
        return messages
    told = [instructions]
    rest = list(messages)
    while rest and rest[0].role in ("system", "developer"):
        told.append(rest.pop(0).content or "")
    return (Message(role="system", content="\n\n".join(told)), *rest)


def _to_message(item: JsonObject, names: dict[str, str]) -> Message:
    if item["type"] == "message":
        return Message(role=item["role"], content=_join_text(item["content"]))
    assert item["type"] == "function_call_output"
    call_id = item["call_id"]
    return Message(
        role="tool",
        content=_join_text(item["output"]),
        tool_call_id=call_id,
        name=names.get(call_id),
    )


def _to_tool_call(item: JsonObject) -> ToolCall:
    arguments = normalize_arguments(item["arguments"])
    return ToolCall(id=item["call_id"], name=item["name"], arguments=arguments)


def _join_text(content: str | list[JsonObject]) -> str:
    """Each part is a paragraph, as in chat completions."""
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if "refusal" in part else part["text"] for part in content)
