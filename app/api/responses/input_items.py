"""The input items of /v1/responses: their parsing, their normalized form, and their conversion to
messages.

Knows: all item fields that a model with images and function calling supports, how items are
converted to the messages of a conversation. Must not know: item storage, chat templates.

All other items are rejected with an error that contains their type and path, except those of
OpenAI's tools, which app/api/schema/responses.py omits. Items are stored, listed and passed to the
model in normalized form.

Format: OpenAI's API reference, `ResponseInputItem`.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from app.api.attachments import (
    AttachmentKind,
    read_attachment,
    read_image_url,
    refuse_image_file,
)
from app.api.fields import invalid_request, quote_value
from app.api.opaque_reasoning import decode_reasoning
from app.api.openai.chat import is_new_question, normalize_arguments, normalize_content
from app.api.responses.tools import CUSTOM_INPUT, qualify_name
from app.api.schema.decode import require
from app.api.schema.responses import InputItem, ItemPart
from app.core.errors import AppError, ErrorKind
from app.core.images import ContentPart, PlacedImage, join_parts, split_parts
from app.core.requests import Message, ToolCall
from app.http.responses import JsonObject

_OUTPUT_TYPES = ("function_call_output", "custom_tool_call_output")

_INPUT_PARTS = ("input_text", "input_image", "input_file", "input_audio")
_OUTPUT_PARTS = ("output_text", "refusal", "input_text")
_ATTACHMENTS: Mapping[str, AttachmentKind] = {
    "input_file": "file",
    "input_audio": "audio",
}


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


def build_messages(
    earlier: Sequence[JsonObject], items: Sequence[JsonObject], question: int | None = None
) -> tuple[Message, ...]:
    """Converts normalized items to messages. A truncated call was never executed, so it is dropped.
    earlier: the items of stored responses. items: those of this request. question: the index of the
    item that is the user's new question; None for none. Raises AppError(INVALID) for an image of
    the question that cannot be read."""
    messages: list[Message | None] = []
    names: dict[str, str] = {}
    turn = _AssistantTurn()
    for index, item in enumerate((*earlier, *items), -len(earlier)):
        match item["type"], item.get("role"):
            case "reasoning", _:
                turn.reasoning += [part["text"] for part in item["content"]]
                continue
            case "message", "assistant":
                turn.content.append(_join_parts(item["content"], "", omit=True)[0])
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
        path = f"input.{index}" if index >= 0 else "previous_response_id"
        messages.append(_to_message(item, names, path, omit=index != question))
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
    parts: list[ContentPart] = [instructions]
    rest = list(messages)
    while rest and rest[0].role in ("system", "developer"):
        first = rest.pop(0)
        parts += split_parts(first.content, first.images)
    text, images = join_parts(parts, "\n\n")
    return (Message(role="system", content=text, images=images), *rest)


def _to_message(item: JsonObject, names: dict[str, str], path: str, *, omit: bool) -> Message:
    """omit: whether images that cannot be read are omitted, rather than rejected."""
    if item["type"] == "message":
        text, images = _join_parts(item["content"], f"{path}.content", omit=omit)
        return Message(role=item["role"], content=text, images=images)
    assert item["type"] in _OUTPUT_TYPES
    text, images = _join_parts(item["output"], f"{path}.output", omit=True)
    call_id = item["call_id"]
    return Message(
        role="tool",
        content=text,
        images=images,
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


def _join_parts(
    content: str | list[JsonObject], path: str, *, omit: bool
) -> tuple[str, tuple[PlacedImage, ...]]:
    """Joins parts as separate paragraphs, as in chat completions."""
    if isinstance(content, str):
        return content, ()
    return join_parts(
        _read_part(part, f"{path}.{index}", omit=omit) for index, part in enumerate(content)
    )


def _read_part(part: JsonObject, path: str, *, omit: bool) -> ContentPart:
    if part.get("type") != "input_image":
        return part["refusal"] if "refusal" in part else part["text"]
    if part["image_url"] is None and "file_id" in part:
        return refuse_image_file(path, "file_id", omit=omit)
    return read_image_url(part["image_url"], path, detail=part["detail"], omit=omit)


ItemLookup = Callable[[str], JsonObject | None]
"""Returns a stored item by its ID, or None if it is not stored."""


def new_item_id(prefix: str) -> str:
    return f"{prefix}_{os.urandom(24).hex()}"


def build_input(value: str | Sequence[InputItem], find_item: ItemLookup) -> list[JsonObject]:
    """Converts the field `input`, which is the text of a user message or a list of items. Raises
    AppError(INVALID) or AppError(NOT_FOUND)."""
    if isinstance(value, str):
        return [_message_item("user", [_input_text(value)])]
    question = find_question(value)
    return [
        _build_item(item, f"input.{index}", find_item, omit=index != question)
        for index, item in enumerate(value)
    ]


def find_question(value: str | Sequence[InputItem]) -> int | None:
    """Returns the index of the user's new question in `input`, or None."""
    if isinstance(value, str):
        return 0
    return len(value) - 1 if is_new_question([*map(_get_role, value)]) else None


def _get_role(item: InputItem) -> str:
    """Returns the role of an item, for `is_new_question`."""
    if item.role is not None:
        return item.role
    return "tool" if item.type in _OUTPUT_TYPES else "assistant"


def _build_item(item: InputItem, path: str, find_item: ItemLookup, *, omit: bool) -> JsonObject:
    """Converts an item. omit: whether its audio and files are omitted, rather than rejected."""
    match item.type or ("message" if item.role is not None else "item_reference"):
        case "message":
            return _build_message(item, path, omit=omit)
        case "function_call":
            return {
                "type": "function_call",
                "id": item.id or new_item_id("fc"),
                **_build_call(item, path),
                "arguments": require(item.arguments, f"{path}.arguments"),
                "status": _get_status(item),
            }
        case "custom_tool_call":
            return {
                "type": "custom_tool_call",
                "id": item.id or new_item_id("ctc"),
                **_build_call(item, path),
                "input": require(item.input, f"{path}.input"),
                "status": _get_status(item),
            }
        case "function_call_output" | "custom_tool_call_output" as type_:
            return _build_tool_output(item, type_, path)
        case "reasoning":
            return _build_reasoning(item, path)
        case "item_reference":
            return _find_referenced(item, path, find_item)


def _build_message(item: InputItem, path: str, *, omit: bool) -> JsonObject:
    role = require(item.role, f"{path}.role")
    is_answer = role == "assistant"
    types = _OUTPUT_PARTS if is_answer else _INPUT_PARTS
    parts = _build_parts(item.content, f"{path}.content", types, omit=omit)
    if isinstance(parts, str):
        parts = [_output_text(parts) if is_answer else _input_text(parts)]
    return _message_item(role, parts, id_=item.id, status=_get_status(item))


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


def _build_parts(
    content: str | Sequence[ItemPart] | None, path: str, types: Collection[str], *, omit: bool
) -> str | list[JsonObject]:
    if content is None or isinstance(content, str):
        return content or ""
    return [
        _build_part(part, f"{path}.{index}", types, omit=omit) for index, part in enumerate(content)
    ]


def _build_part(part: ItemPart, path: str, types: Collection[str], *, omit: bool) -> JsonObject:
    _check_type(part, path, types)
    if part.type in _ATTACHMENTS:
        return _input_text(read_attachment(_ATTACHMENTS[part.type], f"{path}.type", omit=omit))
    if part.type == "input_image":
        return {
            "type": "input_image",
            "image_url": part.image_url,
            "detail": part.detail or "auto",
            **({} if part.file_id is None else {"file_id": part.file_id}),
        }
    if part.type == "refusal":
        return {"type": "refusal", "refusal": require(part.refusal, f"{path}.refusal")}
    text = require(part.text, f"{path}.text")
    if part.type != "output_text":
        return _input_text(text)
    # annotations are not passed to the model and are therefore not stored
    for name, value in (("annotations", part.annotations), ("logprobs", part.logprobs)):
        if bytes(memoryview(value)[:1]) not in (b"[", b"n"):
            raise invalid_request(f"{path}.{name}", f"{path}.{name} must be an array")
    return _output_text(text)


def _check_type(part: ItemPart, path: str, types: Collection[str]) -> None:
    if part.type not in types:
        path = f"{path}.type"
        raise invalid_request(
            path,
            f"{path} is {quote_value(part.type)}, which is not supported: use {' or '.join(types)}",
        )


def _build_call(item: InputItem, path: str) -> JsonObject:
    return {
        "call_id": require(item.call_id, f"{path}.call_id"),
        "name": require(item.name, f"{path}.name"),
        **({} if item.namespace is None else {"namespace": item.namespace}),
    }


def _build_tool_output(item: InputItem, type_: str, path: str) -> JsonObject:
    """Converts the output of a call. Its name and namespace are redundant."""
    return {
        "type": type_,
        "id": item.id or new_item_id("fco" if type_ == _OUTPUT_TYPES[0] else "ctco"),
        "call_id": require(item.call_id, f"{path}.call_id"),
        "output": _build_parts(item.output, f"{path}.output", _INPUT_PARTS, omit=True),
        "status": _get_status(item),
    }


def _build_reasoning(item: InputItem, path: str) -> JsonObject:
    """Converts a reasoning item. The text is passed to the model; a summary is only stored. If this
    server created the item, the text may be only in `encrypted_content`. Content encrypted by
    another server is ignored, like an item without text."""
    if isinstance(item.content, str):
        raise invalid_request(f"{path}.content", f"{path}.content must be an array of parts")
    content = _build_texts(item.content, f"{path}.content", ("reasoning_text", "text"))
    if not content and item.encrypted_content is not None:
        text = decode_reasoning(item.encrypted_content)
        content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {
        "type": "reasoning",
        "id": item.id or new_item_id("rs"),
        "summary": _build_texts(item.summary, f"{path}.summary", ("summary_text",)),
        "content": content,
        "status": _get_status(item),
    }


def _build_texts(
    parts: Sequence[ItemPart] | None, path: str, types: Sequence[str]
) -> list[JsonObject]:
    """Converts text parts. types: the allowed part types; all are converted to the first type."""
    built: list[JsonObject] = []
    for index, part in enumerate(parts or ()):
        _check_type(part, f"{path}.{index}", types)
        text = require(part.text, f"{path}.{index}.text")
        built.append({"type": types[0], "text": text})
    return built


def _find_referenced(item: InputItem, path: str, find_item: ItemLookup) -> JsonObject:
    id_ = require(item.id, f"{path}.id")
    referenced = find_item(id_)
    if referenced is None:
        path = f"{path}.id"
        raise AppError(
            ErrorKind.NOT_FOUND,
            f"{path}: the item {quote_value(id_)} was not found: send the item itself",
            param=path,
            code="item_not_found",
        )
    return referenced


def _get_status(item: InputItem) -> str:
    return item.status or "completed"
