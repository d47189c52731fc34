"""OpenAI's messages: converts JSON to a conversation.

Knows: every field of every documented role, the order of tool calls and their results, the
arguments of earlier calls. Must not know: chat templates.

For content that a text model cannot process (images, audio, files), see app/api/attachments.py.
Unknown fields of messages, parts and calls are ignored and reported: a client sends back what
another server added to an earlier response.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from app.api.attachments import AttachmentKind, is_new_question, peek, read_attachment
from app.api.fields import Fields, as_array, invalid_request, quote_value
from app.core.requests import Conversation, Message, ToolCall

# the key under which a template receives arguments that are not an object
INVALID_ARGUMENTS_KEY = "invalid_arguments"


def normalize_arguments(text: str) -> str:
    """Returns the arguments as JSON text of an object, because templates can only render objects.
    Clients send "" for no arguments. Other text was truncated or is a model error; it is stored
    under INVALID_ARGUMENTS_KEY."""
    object_ = text.strip() or "{}"
    return (
        object_
        if isinstance(_try_parse(object_), dict)
        else orjson.dumps({INVALID_ARGUMENTS_KEY: text}).decode()
    )


def normalize_content(text: str | None, *, has_calls: bool = False) -> str | None:
    """Returns the content of a message. Null, missing and empty content are the same, because
    clients send back any of them: None next to calls, and "" otherwise."""
    return text or (None if has_calls else "")


def _try_parse(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


# the types of parts that a text model cannot read; "video_url" is vLLM's
_ATTACHMENTS: Mapping[str, AttachmentKind] = {
    "image_url": "image",
    "input_audio": "audio",
    "file": "file",
    "video_url": "file",
}

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_conversation(fields: Fields) -> Conversation:
    fields.required("messages")
    messages = fields.array("messages")
    if not messages:
        raise invalid_request("messages", "messages must contain at least one message")
    roles = [str(peek(message, "role")) for message in messages]
    question = len(messages) - 1 if is_new_question(roles) else None
    read = tuple(
        _message(Fields.from_value(message, f"messages.{n}"), omit=n != question)
        for n, message in enumerate(messages)
    )
    _check_tool_results(read)
    return Conversation(messages=read)


def _check_tool_results(messages: Sequence[Message]) -> None:
    """Enforces OpenAI's rule, with OpenAI's error messages: a message with tool calls must be
    followed by the results of all calls, without other messages in between. Raises
    AppError(INVALID) otherwise."""
    called_at, called, waiting = 0, frozenset[str](), set[str]()
    for n, message in enumerate(messages):
        id_ = message.tool_call_id
        if id_ is None:
            _check_all_results_given(called_at, waiting)
            called_at, called = n, frozenset(call.id for call in message.tool_calls)
            waiting = set(called)
        elif not called:
            raise invalid_request(
                f"messages.{n}.role",
                f"messages.{n}: messages with role 'tool' must be a response to a preceding "
                "message with 'tool_calls'",
            )
        elif id_ not in called:
            path = f"messages.{n}.tool_call_id"
            raise invalid_request(
                path,
                f"{path} of {quote_value(id_)} not found in 'tool_calls' of previous "
                "message, which is "
                f"messages.{called_at}",
            )
        else:
            waiting.discard(id_)
    _check_all_results_given(called_at, waiting)


def _check_all_results_given(at: int, waiting: Collection[str]) -> None:
    if waiting:
        raise invalid_request(
            f"messages.{at}.tool_calls",
            f"messages.{at}: an assistant message with 'tool_calls' must be followed by tool "
            "messages responding to each 'tool_call_id'. The following tool_call_ids did not have "
            f"response messages: {', '.join(sorted(waiting))[:400]}",
        )


def _message(fields: Fields, *, omit: bool) -> Message:
    """Reads a message. omit: whether its attachments are omitted, rather than rejected."""
    role = fields.required_string("role")
    if role not in ROLES:
        path = fields.path("role")
        raise invalid_request(
            path, f"{path} must be one of {', '.join(ROLES)}, not {quote_value(role)}"
        )
    name = fields.string("name")
    if role == "assistant":
        message = _assistant(fields, name)
    else:
        fields.reject("tool_calls", [])
        for reasoning in ("reasoning_content", "reasoning"):
            fields.reject(reasoning, "")
        message = Message(
            role=role,
            content=normalize_content(_content(fields, ("text",), omit=omit)),
            name=name,
            tool_call_id=fields.required_string("tool_call_id") if role == "tool" else None,
        )
    fields.ignore_unknown("annotations", "cache_control", "id")
    return message


def _assistant(fields: Fields, name: str | None) -> Message:
    """Reads an assistant message as sent by this or another server, including empty extra
    fields."""
    fields.reject("audio")
    fields.reject("function_call", instead="use tool_calls")
    content = _content(fields, ("text", "refusal"), omit=True)
    refusal = fields.string("refusal")
    fields.value("parsed")  # set by the SDK: the value parsed from the content
    reasoning = _read_reasoning(fields)
    calls = _tool_calls(fields)
    # A refusal is treated as part of the assistant's text.
    texts = [text for text in (content, refusal) if text is not None]
    text = normalize_content("\n".join(filter(None, texts)), has_calls=bool(calls))
    return Message(role="assistant", content=text, reasoning=reasoning, name=name, tool_calls=calls)


def _read_reasoning(fields: Fields) -> str | None:
    """Returns the reasoning from either of the two field names used in responses. A client may send
    both."""
    older, newer = fields.string("reasoning_content"), fields.string("reasoning")
    if older and newer and older != newer:
        path = fields.path("reasoning")
        other = fields.path("reasoning_content")
        raise invalid_request(path, f"{path} and {other} are aliases but differ: keep one of them")
    return older or newer or None


def _content(fields: Fields, allowed: tuple[str, ...], *, omit: bool) -> str | None:
    value = fields.value("content")
    path = fields.path("content")
    if value is None or isinstance(value, str):
        return value
    parts = as_array(value)
    if parts is None:
        raise invalid_request(
            path, f"{path} must be a string or an array of parts, not {quote_value(value)}"
        )
    # Each part becomes a paragraph, as in vLLM and llama.cpp, so that parts do not run together.
    return "\n".join(_part(part, f"{path}.{n}", allowed, omit=omit) for n, part in enumerate(parts))


def _part(value: object, path: str, allowed: tuple[str, ...], *, omit: bool) -> str:
    fields = Fields.from_value(value, path)
    type_ = fields.required_string("type")
    if type_ in _ATTACHMENTS:
        return read_attachment(_ATTACHMENTS[type_], path, omit=omit)
    if type_ not in allowed:
        raise invalid_request(
            path,
            f"{path} is a part of type {quote_value(type_)}, which is not supported: "
            f"use {' or '.join(allowed)}",
        )
    text = fields.required_string(type_)
    fields.ignore_unknown("cache_control")
    return text


def _tool_calls(fields: Fields) -> tuple[ToolCall, ...]:
    calls = fields.array("tool_calls") or []
    path = fields.path("tool_calls")
    return tuple(_tool_call(Fields.from_value(call, f"{path}.{n}")) for n, call in enumerate(calls))


def _tool_call(fields: Fields) -> ToolCall:
    id_ = fields.required_string("id")
    fields.integer("index", 0)  # redundant: the array defines the order of the calls
    type_ = fields.required_string("type")
    if type_ != "function":
        path = fields.path("type")
        raise invalid_request(path, f"{path} must be 'function', not {quote_value(type_)}")
    function = Fields.from_value(fields.required("function"), fields.path("function"))
    name = function.required_string("name")
    function.value("parsed_arguments")  # set by the SDK: the value parsed from the arguments
    arguments = normalize_arguments(function.required_string("arguments"))
    function.ignore_unknown()
    fields.ignore_unknown()
    return ToolCall(id=id_, name=name, arguments=arguments)
