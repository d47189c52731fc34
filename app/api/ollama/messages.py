"""Ollama's messages and tools: converts their structs to a conversation.

Knows: every field of a message and of a tool, how results are matched to calls. Must not know: chat
templates.

Many clients do not send call IDs back (ollama-python, LangChain). A result without an ID is matched
to the first call with the same name that has no result yet. A result without a name or ID is
matched to the first call that has no result yet.
"""

from collections.abc import Sequence
from dataclasses import replace

import orjson

from app.api.attachments import read_image_data, read_image_url
from app.api.fields import as_mapping, drop_nulls, invalid_request, quote_value
from app.api.openai.chat import (
    NO_PARAMETERS,
    check_tool_names,
    is_new_question,
    normalize_arguments,
    normalize_content,
)
from app.api.schema import ollama as schema
from app.api.schema.decode import decode_json, decode_object
from app.core.images import ContentPart, join_parts
from app.core.models import ModelDetails
from app.core.requests import Message, Tool, ToolCall


def build_messages(messages: Sequence[schema.OllamaMessage]) -> tuple[Message, ...]:
    """Raises AppError(INVALID) for an unknown role, and for an image of a new question that
    cannot be read."""
    roles = [message.role.lower() for message in messages]
    question = len(roles) - 1 if is_new_question(roles) else None
    built = [
        _build_message(message, f"messages.{index}", omit=index != question)
        for index, message in enumerate(messages)
    ]
    return tuple(_match_results(built))


def read_images(images: Sequence[str] | None, path: str, *, omit: bool) -> tuple[ContentPart, ...]:
    """Reads base64 strings or data URLs. omit: whether images that cannot be read are replaced with
    text, rather than rejected."""
    return tuple(
        read_image_url(data, f"{path}.{index}", omit=omit)
        if data.startswith("data:")
        else read_image_data(data, f"{path}.{index}", omit=omit)
        for index, data in enumerate(images or ())
    )


def _build_message(message: schema.OllamaMessage, path: str, *, omit: bool) -> Message:
    """omit: as in `read_images`."""
    role = message.role.lower()
    if role not in schema.ROLES:
        shown = quote_value(role)
        raise invalid_request(
            f"{path}.role", f"invalid role {shown}: it must be one of {', '.join(schema.ROLES)}"
        )
    # as in Ollama, the images come before the text
    parts = (*read_images(message.images, f"{path}.images", omit=omit), message.content)
    content, images = join_parts(filter(None, parts))
    is_assistant, is_tool = role == "assistant", role == "tool"
    calls = tuple(
        _build_call(call, f"{path}.tool_calls.{index}", f"call_{path.rpartition('.')[2]}_{index}")
        for index, call in enumerate(message.tool_calls or ())
    )
    return Message(
        role=role,
        content=normalize_content(content, has_calls=is_assistant and bool(calls)),
        images=images,
        reasoning=(message.thinking or None) if is_assistant else None,
        name=(message.tool_name or None) if is_tool else None,
        tool_calls=calls if is_assistant else (),
        tool_call_id=(message.tool_call_id or None) if is_tool else None,
    )


def _build_call(call: schema.OllamaToolCall, path: str, default_id: str) -> ToolCall:
    """Ollama's clients send an object as arguments; a string, as in OpenAI's API, is also
    accepted."""
    function = call.function
    arguments = decode_json(function.arguments)
    if not isinstance(arguments, str):
        at = f"{path}.function.arguments"
        object_ = {} if arguments is None else as_mapping(arguments, at)
        arguments = orjson.dumps(object_).decode()
    return ToolCall(
        id=call.id or default_id, name=function.name, arguments=normalize_arguments(arguments)
    )


def _match_results(messages: Sequence[Message]) -> list[Message]:
    """Sets the call ID of each result. A result without a call gets a new ID, because templates use
    only its text."""
    matched: list[Message] = []
    waiting: list[ToolCall] = []
    for place, message in enumerate(messages):
        if message.role != "tool":
            waiting = list(message.tool_calls) or waiting
            matched.append(message)
            continue
        call = _find_call(message, waiting)
        if call is None:
            matched.append(replace(message, tool_call_id=message.tool_call_id or f"result_{place}"))
            continue
        waiting.remove(call)
        matched.append(replace(message, tool_call_id=call.id, name=call.name))
    return matched


def _find_call(result: Message, waiting: Sequence[ToolCall]) -> ToolCall | None:
    for call in waiting:
        if result.tool_call_id is not None and call.id == result.tool_call_id:
            return call
    named = [call for call in waiting if call.name == result.name]
    if result.name is not None:
        return named[0] if named else None
    return waiting[0] if waiting and result.tool_call_id is None else None


def build_tools(
    tools: Sequence[schema.OllamaTool] | None, details: ModelDetails
) -> tuple[Tool, ...]:
    """Raises AppError(INVALID), for example if the model does not support tools."""
    built = tuple(
        _build_tool(tool.function, f"tools.{index}.function")
        for index, tool in enumerate(tools or ())
    )
    check_tool_names(built)
    if built and "tools" not in details.capabilities:
        raise invalid_request("tools", f'"{details.name}" does not support tools')
    return built


def _build_tool(function: schema.OllamaFunction, path: str) -> Tool:
    """Clients send null for absent attributes of a parameter."""
    parameters = decode_object(function.parameters, f"{path}.parameters")
    return Tool(
        name=function.name,
        description=function.description,
        parameters=drop_nulls(parameters) or NO_PARAMETERS,
        strict=function.strict or False,
        param=path,
    )
