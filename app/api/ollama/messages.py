"""Ollama's messages and tools: converts JSON to a conversation.

Knows: every field of a message and of a tool, how results are matched to calls. Must not know: chat
templates.

Many clients do not send call IDs back (ollama-python, LangChain). A result without an ID is matched
to the first call with the same name that has no result yet. A result without a name or ID is
matched to the first call that has no result yet.
"""

from collections.abc import Sequence
from dataclasses import replace

import orjson

from app.api.attachments import is_new_question, peek, read_attachment
from app.api.fields import Fields, drop_nulls, invalid_request, quote_value
from app.api.openai.messages import normalize_arguments, normalize_content
from app.api.openai.tools import NO_PARAMETERS, check_tool_names, read_function
from app.core.models import ModelDetails
from app.core.requests import Message, Tool, ToolCall

ROLES = ("system", "user", "assistant", "tool")


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """Reads `messages`. Returns () if there are none. Raises AppError(INVALID)."""
    values = fields.array("messages") or []
    question = len(values) - 1 if is_new_question([*map(_peek_role, values)]) else None
    messages: list[Message] = []
    for place, value in enumerate(values):
        message = Fields.from_value(value, f"messages.{place}")
        messages.append(_read_message(message, place, omit=place != question))
    return tuple(_match_results(messages))


def reject_images(fields: Fields) -> None:
    if fields.array("images"):
        path = fields.path("images")
        raise invalid_request(path, f"{path}: this model does not support vision")


def _peek_role(value: object) -> str:
    """Returns the role of a message that is not yet checked, for `is_new_question`."""
    return str(peek(value, "role")).lower()


def _read_images(fields: Fields) -> list[str]:
    """Returns the text that replaces each image of an earlier message or a tool result."""
    path = fields.path("images")
    images = fields.array("images") or ()
    return [read_attachment("image", path, omit=True) for _ in images]


def _read_message(fields: Fields, place: int, *, omit: bool) -> Message:
    """Reads a message. omit: whether its images are omitted, rather than rejected."""
    role = fields.required_string("role").lower()
    if role not in ROLES:
        shown = quote_value(role)
        raise invalid_request(
            fields.path("role"), f"invalid role {shown}: it must be one of {', '.join(ROLES)}"
        )
    if not omit:
        reject_images(fields)
    is_assistant, is_tool = role == "assistant", role == "tool"
    calls = tuple(_read_calls(fields, place))
    thinking = fields.string("thinking")
    content = "\n".join(filter(None, (fields.string("content"), *_read_images(fields))))
    name, call_id = fields.string("tool_name"), fields.string("tool_call_id")
    fields.ignore_unknown()
    return Message(
        role=role,
        content=normalize_content(content, has_calls=is_assistant and bool(calls)),
        reasoning=(thinking or None) if is_assistant else None,
        name=(name or None) if is_tool else None,
        tool_calls=calls if is_assistant else (),
        tool_call_id=(call_id or None) if is_tool else None,
    )


def _read_calls(fields: Fields, place: int) -> list[ToolCall]:
    path = fields.path("tool_calls")
    calls: list[ToolCall] = []
    for number, value in enumerate(fields.array("tool_calls") or ()):
        call = Fields.from_value(value, f"{path}.{number}")
        function = Fields.from_value(call.required("function"), call.path("function"))
        arguments = function.value("arguments")
        # Ollama's clients send an object; a text, as in OpenAI's API, is also accepted
        text = arguments if isinstance(arguments, str) else _dump(function)
        calls.append(
            ToolCall(
                id=call.string("id") or f"call_{place}_{number}",
                name=function.required_string("name"),
                arguments=normalize_arguments(text),
            )
        )
        function.ignore_unknown("index")
        call.ignore_unknown("type")
    return calls


def _dump(function: Fields) -> str:
    return orjson.dumps(function.mapping("arguments") or {}).decode()


def _match_results(messages: Sequence[Message]) -> list[Message]:
    """Sets the call ID of each result. A result without a call gets an ID of its own, because
    templates use only its text."""
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


def read_tools(fields: Fields, details: ModelDetails) -> tuple[Tool, ...]:
    """Reads `tools`. Raises AppError(INVALID), also for a model that does not support tools."""
    tools: list[Tool] = []
    for place, value in enumerate(fields.array("tools") or ()):
        entry = Fields.from_value(drop_nulls_in(value, f"tools.{place}"), f"tools.{place}")
        kind = entry.string("type") or "function"
        if kind != "function":
            path = entry.path("type")
            raise invalid_request(path, f"{path} must be 'function', not {quote_value(kind)}")
        at = entry.path("function")
        function = Fields.from_value(entry.required("function"), at)
        tool = read_function(function, at)
        function.ignore_unknown()
        entry.ignore_unknown("items")
        tools.append(tool if tool.parameters else replace(tool, parameters=NO_PARAMETERS))
    check_tool_names(tools)
    if tools and "tools" not in details.capabilities:
        raise invalid_request("tools", f'"{details.name}" does not support tools')
    return tuple(tools)


def drop_nulls_in(value: object, path: str) -> object:
    """Removes nulls from a tool. Clients send null for absent attributes of a parameter."""
    Fields({"tool": value}, path).mapping("tool")  # raises if it is nested too deeply
    return drop_nulls(value)
