"""The input items of /v1/responses: their parsing, their normalized form, and their conversion to
messages.

Knows: every field of the items that a text model with functions supports, how items form the
messages of a conversation. Must not know: where items are stored, chat templates.

Every other item is rejected by its type and path. Items are stored, listed and given to the model
in their normalized form.

Format: OpenAI's API reference, `ResponseInputItem`.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from app.api.fields import Fields, as_array, invalid_request, quote_value
from app.api.openai.messages import normalize_arguments
from app.core.errors import AppError, ErrorKind
from app.core.requests import Message, ToolCall
from app.http.responses import JsonObject


@dataclass(slots=True)
class _AssistantTurn:
    """The assistant's output between two other messages. It may contain reasoning, text and calls
    in any order and number; templates take one of each, in this order."""

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
    """Converts normalized items to messages. A call that was truncated was never made and is
    dropped. Raises AppError(INVALID) for an earlier call with invalid arguments."""
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
    """Puts instructions before the conversation. Many templates accept one system message, at the
    start only, so a leading system message of the conversation is merged into it."""
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
    """Joins parts as paragraphs, as in chat completions."""
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if "refusal" in part else part["text"] for part in content)


ROLES = ("user", "assistant", "system", "developer")
STATUSES = ("in_progress", "completed", "incomplete")
TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")

ItemLookup = Callable[[str], JsonObject | None]
"""Returns a stored item by its id; None if it is not stored."""


def new_item_id(prefix: str) -> str:
    return f"{prefix}_{os.urandom(24).hex()}"


def read_input(fields: Fields, find_item: ItemLookup) -> list[JsonObject]:
    """Reads the field `input`: a user's text or items. Raises AppError(INVALID or NOT_FOUND)."""
    value: object = fields.required("input")
    if isinstance(value, str):
        return [_message_item("user", [{"type": "input_text", "text": value}])]
    items = as_array(value)
    if items is None:
        raise invalid_request(
            "input", f"input must be a string or an array of items, not {quote_value(value)}"
        )
    return [
        _item(Fields.from_value(item, f"input.{place}"), find_item)
        for place, item in enumerate(items)
    ]


def _item(fields: Fields, resolve: ItemLookup) -> JsonObject:
    match _type(fields):
        case "message":
            item = _message(fields)
        case "function_call":
            item = _function_call(fields)
        case "function_call_output":
            item = _function_call_output(fields)
        case "reasoning":
            item = _read_reasoning(fields)
        case "item_reference":
            item = _resolve_reference(fields, resolve)
        case other:
            path = fields.path("type")
            supported = ", ".join(TYPES)
            raise invalid_request(
                path, f"{path} is {quote_value(other)}, which is not supported: use {supported}"
            )
    fields.reject_unknown()
    return item


def _type(fields: Fields) -> str:
    """Returns the type of an item, which two kinds of item may omit."""
    type_ = fields.string("type")
    if type_ is not None:
        return type_
    return "message" if fields.value("role") is not None else "item_reference"


def _message(fields: Fields) -> JsonObject:
    role = fields.required_one_of("role", ROLES)
    fields.one_of("phase", ("commentary", "final_answer"))
    said = ("output_text", "refusal", "input_text") if role == "assistant" else ("input_text",)
    fields.required("content")
    parts = _parts(fields, "content", said)
    if isinstance(parts, str):
        written = _output_text(parts) if role == "assistant" else _input_text(parts)
        parts = [written]
    return _message_item(role, parts, id_=fields.string("id"), status=_status(fields))


def _message_item(
    role: str, content: list[JsonObject], *, id_: str | None = None, status: str = "completed"
) -> JsonObject:
    return {
        "type": "message",
        "id": id_ or new_item_id("msg"),
        "status": status,
        "role": role,
        "content": content,
    }


def _input_text(text: str) -> JsonObject:
    return {"type": "input_text", "text": text}


def _output_text(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _parts(fields: Fields, name: str, allowed: tuple[str, ...]) -> str | list[JsonObject]:
    value = fields.value(name)
    path = fields.path(name)
    if isinstance(value, str):
        return value
    parts = as_array(value)
    if parts is None:
        raise invalid_request(
            path, f"{path} must be a string or an array of parts, not {quote_value(value)}"
        )
    return [_part(Fields.from_value(part, f"{path}.{n}"), allowed) for n, part in enumerate(parts)]


def _part(fields: Fields, allowed: tuple[str, ...]) -> JsonObject:
    type_ = fields.required_string("type")
    if type_ not in allowed:
        path = fields.path("type")
        raise invalid_request(
            path,
            f"{path} is {quote_value(type_)}, which is not supported: use {' or '.join(allowed)}",
        )
    if type_ == "refusal":
        part: JsonObject = {"type": type_, "refusal": fields.required_string("refusal")}
    elif type_ == "output_text":
        part = _output_text(fields.required_string("text"))
        # annotations are not shown to the model, and therefore not stored
        fields.array("annotations")
        fields.array("logprobs")
    else:
        part = _input_text(fields.required_string("text"))
    fields.reject("prompt_cache_breakpoint")
    fields.reject_unknown()
    return part


def _function_call(fields: Fields) -> JsonObject:
    status = _status(fields)
    arguments = fields.required_string("arguments")
    fields.reject("async", False)
    fields.reject("caller", {"type": "direct"})
    fields.reject("namespace")
    return {
        "type": "function_call",
        "id": fields.string("id") or new_item_id("fc"),
        "call_id": fields.required_string("call_id"),
        "name": fields.required_string("name"),
        "arguments": arguments,
        "status": status,
    }


def _function_call_output(fields: Fields) -> JsonObject:
    fields.required("output")
    fields.reject("caller", {"type": "direct"})
    fields.reject("namespace")
    fields.reject("name")
    return {
        "type": "function_call_output",
        "id": fields.string("id") or new_item_id("fco"),
        "call_id": fields.required_string("call_id"),
        "output": _parts(fields, "output", ("input_text",)),
        "status": _status(fields),
    }


def _read_reasoning(fields: Fields) -> JsonObject:
    """Reads a reasoning item. Its text is given to the model; a summary is stored only. An item
    without text, from a client that keeps only encrypted content, has no effect."""
    if fields.value("encrypted_content") is not None:
        path = fields.path("encrypted_content")
        raise invalid_request(
            path,
            f"{path} was encrypted by another server and cannot be decrypted: leave the item out",
        )
    return {
        "type": "reasoning",
        "id": fields.string("id") or new_item_id("rs"),
        "summary": _texts(fields, "summary", "summary_text"),
        "content": _texts(fields, "content", "reasoning_text"),
        "status": _status(fields),
    }


def _texts(fields: Fields, name: str, type_: str) -> list[JsonObject]:
    read: list[JsonObject] = []
    for place, value in enumerate(fields.array(name) or []):
        part = Fields.from_value(value, f"{fields.path(name)}.{place}")
        part.required_one_of("type", (type_,))
        read.append({"type": type_, "text": part.required_string("text")})
        part.reject_unknown()
    return read


def _resolve_reference(fields: Fields, resolve: ItemLookup) -> JsonObject:
    id_ = fields.required_string("id")
    item = resolve(id_)
    if item is None:
        path = fields.path("id")
        raise AppError(
            ErrorKind.NOT_FOUND,
            f"{path}: the item {quote_value(id_)} was not found: send the item itself",
            param=path,
            code="item_not_found",
        )
    return item


def _status(fields: Fields) -> str:
    return fields.one_of("status", STATUSES) or "completed"
