"""The input items of /v1/responses: their parsing, their normalized form, and their conversion to
messages.

Knows: all item fields that a text model with function calling supports, how items are converted to
the messages of a conversation. Must not know: item storage, chat templates.

All other items are rejected with an error that contains their type and path. Items are stored,
listed and passed to the model in normalized form.

Format: OpenAI's API reference, `ResponseInputItem`.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import orjson

from app.api.attachments import AttachmentKind, is_new_question, peek, read_attachment
from app.api.fields import Fields, as_array, invalid_request, quote_value
from app.api.opaque_reasoning import decode_reasoning
from app.api.openai.messages import normalize_arguments, normalize_content
from app.api.responses.tools import CUSTOM_INPUT, qualify_name
from app.core.errors import AppError, ErrorKind
from app.core.requests import Message, ToolCall
from app.http.responses import JsonObject


@dataclass(slots=True)
class _AssistantTurn:
    """The assistant's output between two other messages. It may contain any number of reasoning,
    text and call items in any order. Templates accept at most one of each, in this order."""

    reasoning: list[str] = field(default_factory=list[str])
    content: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def message(self) -> Message | None:
        if not (self.reasoning or self.content or self.calls):
            return None
        return Message(
            role="assistant",
            content=normalize_content("\n".join(self.content), has_calls=bool(self.calls)),
            reasoning="\n".join(self.reasoning) if self.reasoning else None,
            tool_calls=tuple(self.calls),
        )


def build_messages(items: Iterable[JsonObject]) -> tuple[Message, ...]:
    """Converts normalized items to messages. A truncated call was never executed, so it is dropped.
    Raises AppError(INVALID) for an earlier call with invalid arguments."""
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
            case "function_call" | "custom_tool_call", _:
                call = _to_tool_call(item)
                names[call.id] = call.name
                if item["status"] != "incomplete":
                    turn.calls.append(call)
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
    """Inserts instructions before the conversation. Many templates accept only one system message,
    at the start. If the conversation begins with a system message, it is therefore merged into the
    instructions."""
    if instructions is None:
        return messages
    texts = [instructions]
    rest = list(messages)
    while rest and rest[0].role in ("system", "developer"):
        texts.append(rest.pop(0).content or "")
    return (Message(role="system", content="\n\n".join(texts)), *rest)


def _to_message(item: JsonObject, names: dict[str, str]) -> Message:
    if item["type"] == "message":
        return Message(role=item["role"], content=_join_text(item["content"]))
    assert item["type"] in _OUTPUT_TYPES
    call_id = item["call_id"]
    return Message(
        role="tool",
        content=_join_text(item["output"]),
        tool_call_id=call_id,
        name=names.get(call_id),
    )


def _to_tool_call(item: JsonObject) -> ToolCall:
    if item["type"] == "custom_tool_call":
        arguments = orjson.dumps({CUSTOM_INPUT: item["input"]}).decode()
    else:
        arguments = normalize_arguments(item["arguments"])
    name = qualify_name(item["name"], item.get("namespace"))
    return ToolCall(id=item["call_id"], name=name, arguments=arguments)


def _join_text(content: str | list[JsonObject]) -> str:
    """Joins parts as separate paragraphs, as in chat completions."""
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if "refusal" in part else part["text"] for part in content)


ROLES = ("user", "assistant", "system", "developer")
STATUSES = ("in_progress", "completed", "incomplete")
TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "item_reference",
)
_OUTPUT_TYPES = ("function_call_output", "custom_tool_call_output")

_INPUT_PARTS = ("input_text", "input_image", "input_file", "input_audio")
_ATTACHMENTS: Mapping[str, AttachmentKind] = {
    "input_image": "image",
    "input_file": "file",
    "input_audio": "audio",
}

ItemLookup = Callable[[str], JsonObject | None]
"""Returns a stored item by its ID, or None if it is not stored."""


def new_item_id(prefix: str) -> str:
    return f"{prefix}_{os.urandom(24).hex()}"


def read_input(fields: Fields, find_item: ItemLookup) -> list[JsonObject]:
    """Reads the field `input`, which is the text of a user message or a list of items. Raises
    AppError(INVALID) or AppError(NOT_FOUND)."""
    value: object = fields.required("input")
    if isinstance(value, str):
        return [_message_item("user", [{"type": "input_text", "text": value}])]
    items = as_array(value)
    if items is None:
        raise invalid_request(
            "input", f"input must be a string or an array of items, not {quote_value(value)}"
        )
    question = len(items) - 1 if is_new_question([*map(_peek_role, items)]) else None
    return [
        _item(Fields.from_value(item, f"input.{place}"), find_item, omit=place != question)
        for place, item in enumerate(items)
    ]


def _peek_role(item: object) -> str:
    """Returns the role of an item that is not yet checked, for `is_new_question`."""
    if (role := peek(item, "role")) is not None:
        return str(role)
    return "tool" if peek(item, "type") in _OUTPUT_TYPES else "assistant"


def _item(fields: Fields, resolve: ItemLookup, *, omit: bool) -> JsonObject:
    """Reads an item. omit: whether its attachments are omitted, rather than rejected."""
    match _type(fields):
        case "message":
            item = _message(fields, omit=omit)
        case "function_call":
            item = _function_call(fields)
        case "custom_tool_call":
            item = _custom_tool_call(fields)
        case type_ if type_ in _OUTPUT_TYPES:
            item = _tool_output(fields, type_)
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
    fields.ignore_unknown()
    return item


def _type(fields: Fields) -> str:
    """Returns the type of an item. For two types, the field is optional."""
    type_ = fields.string("type")
    if type_ is not None:
        return type_
    return "message" if fields.value("role") is not None else "item_reference"


def _message(fields: Fields, *, omit: bool) -> JsonObject:
    role = fields.required_one_of("role", ROLES)
    fields.one_of("phase", ("commentary", "final_answer"))
    is_answer = role == "assistant"
    part_types = ("output_text", "refusal", "input_text") if is_answer else _INPUT_PARTS
    parts = _parts(fields, "content", part_types, omit=omit)
    if isinstance(parts, str):
        written = _output_text(parts) if is_answer else _input_text(parts)
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


def _parts(
    fields: Fields, name: str, allowed: tuple[str, ...], *, omit: bool
) -> str | list[JsonObject]:
    value = fields.value(name)
    path = fields.path(name)
    if value is None or isinstance(value, str):
        return value or ""
    parts = as_array(value)
    if parts is None:
        raise invalid_request(
            path, f"{path} must be a string or an array of parts, not {quote_value(value)}"
        )
    return [
        _part(Fields.from_value(part, f"{path}.{n}"), allowed, omit=omit)
        for n, part in enumerate(parts)
    ]


def _part(fields: Fields, allowed: tuple[str, ...], *, omit: bool) -> JsonObject:
    type_ = fields.required_string("type")
    if type_ not in allowed:
        path = fields.path("type")
        raise invalid_request(
            path,
            f"{path} is {quote_value(type_)}, which is not supported: use {' or '.join(allowed)}",
        )
    if type_ in _ATTACHMENTS:
        return _input_text(read_attachment(_ATTACHMENTS[type_], fields.path("type"), omit=omit))
    if type_ == "refusal":
        part: JsonObject = {"type": type_, "refusal": fields.required_string("refusal")}
    elif type_ == "output_text":
        part = _output_text(fields.required_string("text"))
        # annotations are not passed to the model and are therefore not stored
        fields.array("annotations")
        fields.array("logprobs")
    else:
        part = _input_text(fields.required_string("text"))
    fields.ignore_unknown()
    return part


def _function_call(fields: Fields) -> JsonObject:
    status = _status(fields)
    arguments = fields.required_string("arguments")
    fields.reject("async", False)
    return {
        "type": "function_call",
        "id": fields.string("id") or new_item_id("fc"),
        **_call_fields(fields),
        "arguments": arguments,
        "status": status,
    }


def _custom_tool_call(fields: Fields) -> JsonObject:
    return {
        "type": "custom_tool_call",
        "id": fields.string("id") or new_item_id("ctc"),
        **_call_fields(fields),
        "input": fields.required_string("input"),
        "status": _status(fields),
    }


def _call_fields(fields: Fields) -> JsonObject:
    fields.reject("caller", {"type": "direct"})
    namespace = fields.string("namespace")
    return {
        "call_id": fields.required_string("call_id"),
        "name": fields.required_string("name"),
        **({} if namespace is None else {"namespace": namespace}),
    }


def _tool_output(fields: Fields, type_: str) -> JsonObject:
    """Reads the output of a call. Its name and namespace are redundant."""
    fields.reject("caller", {"type": "direct"})
    fields.string("namespace")
    fields.string("name")
    return {
        "type": type_,
        "id": fields.string("id") or new_item_id("fco" if type_ == _OUTPUT_TYPES[0] else "ctco"),
        "call_id": fields.required_string("call_id"),
        "output": _parts(fields, "output", _INPUT_PARTS, omit=True),
        "status": _status(fields),
    }


def _read_reasoning(fields: Fields) -> JsonObject:
    """Reads a reasoning item. The text is passed to the model; a summary is only stored. If this
    server created the item, the text may be only in `encrypted_content`. Content encrypted by
    another server is ignored, like an item without text."""
    encrypted = fields.string("encrypted_content")
    content = _texts(fields, "content", ("reasoning_text", "text"))
    if not content and encrypted is not None:
        text = decode_reasoning(encrypted)
        content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {
        "type": "reasoning",
        "id": fields.string("id") or new_item_id("rs"),
        "summary": _texts(fields, "summary", ("summary_text",)),
        "content": content,
        "status": _status(fields),
    }


def _texts(fields: Fields, name: str, types: tuple[str, ...]) -> list[JsonObject]:
    """Reads text parts. types: the allowed part types; all are converted to the first type."""
    read: list[JsonObject] = []
    for place, value in enumerate(fields.array(name) or []):
        part = Fields.from_value(value, f"{fields.path(name)}.{place}")
        part.required_one_of("type", types)
        read.append({"type": types[0], "text": part.required_string("text")})
        part.ignore_unknown()
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
