"""OpenAI's messages and tools: converts their structs to a conversation, and to functions that the
model may or must call.

Knows: every documented role, the order of tool calls and their results, the arguments of earlier
calls, the fields `tools`, `tool_choice` and `parallel_tool_calls`. Must not know: chat templates,
the syntax of calls, the supported schemas.

For images, audio and files, see app/api/attachments.py.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from app.api.attachments import read_attachment, read_image_url
from app.api.fields import invalid_request, quote_value
from app.api.schema import messages as schema
from app.api.schema import tools as tool_schema
from app.api.schema.decode import decode_object
from app.api.schema.openai import ChatBody
from app.core.errors import AppError
from app.core.images import ContentPart, join_parts
from app.core.requests import Conversation, Message, NamedToolChoice, Tool, ToolCall, ToolChoice

# the key under which a template receives arguments that are not an object
INVALID_ARGUMENTS_KEY = "invalid_arguments"

NO_PARAMETERS = {"type": "object", "properties": dict[str, Any]()}


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


def is_new_question(roles: Sequence[str]) -> bool:
    """Returns whether the last message is a question of the user. If a tool result precedes it, it
    belongs to the result: some clients send the images that a tool returns in a user message.
    roles: the role of each message, or "tool" if it has a tool result."""
    if not roles or roles[-1] != "user":
        return False
    since_answer = roles[
        max((n for n, role in enumerate(roles) if role == "assistant"), default=0) :
    ]
    return "tool" not in since_answer


def _try_parse(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def build_conversation(messages: Sequence[schema.Message]) -> Conversation:
    """Raises AppError(INVALID) for an attachment in a new question, and for tool calls and results
    that do not belong together."""
    roles = [_get_role(message) for message in messages]
    question = len(messages) - 1 if is_new_question(roles) else None
    built = tuple(
        _build_message(message, f"messages.{index}", omit=index != question)
        for index, message in enumerate(messages)
    )
    _check_tool_results(built)
    return Conversation(messages=built)


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


def _get_role(message: schema.Message) -> str:
    return str(type(message).__struct_config__.tag)


def _build_message(message: schema.Message, at: str, *, omit: bool) -> Message:
    """omit: whether the attachments of the message are omitted, rather than rejected."""
    if isinstance(message, schema.AssistantMessage):
        return _build_assistant_message(message, at)
    content, images = message.content, ()
    if isinstance(content, list):
        content, images = join_parts(_read_parts(content, at, omit=omit))
    return Message(
        role=_get_role(message),
        content=normalize_content(content),
        images=images,
        name=message.name,
        tool_call_id=message.tool_call_id if isinstance(message, schema.ToolMessage) else None,
    )


def _build_assistant_message(message: schema.AssistantMessage, at: str) -> Message:
    """Converts an assistant message as sent by this or another server, including empty extra
    fields. A refusal is treated as part of the assistant's text, and so is audio."""
    calls = tuple(
        ToolCall(
            id=call.id,
            name=call.function.name,
            arguments=normalize_arguments(call.function.arguments or ""),
        )
        for call in message.tool_calls or ()
    )
    parts = [*_read_parts(message.content, at, omit=True), message.refusal]
    if message.audio is not None and not any(parts):  # a client may have added the transcript
        transcript = message.audio.transcript
        parts.append(transcript or read_attachment("audio", f"{at}.audio", omit=True))
    content, images = join_parts(filter(None, parts))
    return Message(
        role="assistant",
        content=normalize_content(content, has_calls=bool(calls)),
        images=images,
        reasoning=_get_reasoning(message, at),
        name=message.name,
        tool_calls=calls,
    )


def _get_reasoning(message: schema.AssistantMessage, at: str) -> str | None:
    """Returns the reasoning from either of the two field names used in responses. A client may send
    both."""
    older, newer = message.reasoning_content, message.reasoning
    if older and newer and older != newer:
        path, other = f"{at}.reasoning", f"{at}.reasoning_content"
        raise invalid_request(path, f"{path} and {other} are aliases but differ: keep one of them")
    return older or newer or None


def _read_parts(
    content: str | Sequence[schema.AssistantPart] | None, at: str, *, omit: bool
) -> Iterator[ContentPart]:
    """Yields the parts, which are separate paragraphs, as in vLLM and llama.cpp, so that they do
    not run together."""
    if isinstance(content, str):
        yield content
        return
    for index, part in enumerate(content or ()):
        yield _read_part(part, f"{at}.content.{index}", omit=omit)


def _read_part(part: schema.AssistantPart, path: str, *, omit: bool) -> ContentPart:
    match part:
        case schema.TextPart(text=text) | schema.RefusalPart(refusal=text):
            return text
        case schema.ThinkingPart():
            return ""
        case schema.ImagePart(image_url=image):
            image = image if isinstance(image, schema.ImageUrl) else schema.ImageUrl(url=image)
            return read_image_url(image.url, path, detail=image.detail, omit=omit)
        case schema.AudioPart():
            return read_attachment("audio", path, omit=omit)
        case schema.FilePart() | schema.VideoPart():
            return read_attachment("file", path, omit=omit)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The functions of a request and their options. constrained: whether a schema or a required
    call constrains the output."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True

    @property
    def must_call(self) -> bool:
        return self.choice == "required" or isinstance(self.choice, NamedToolChoice)

    @property
    def constrained(self) -> bool:
        return self.must_call or (self.choice != "none" and any(t.strict for t in self.tools))


def build_tool_options(body: ChatBody) -> ToolOptions:
    """Returns the tools of a chat completion request. Raises AppError(INVALID)."""
    choice, parallel = body.tool_choice, body.parallel_tool_calls
    if body.tools is None:
        reject_tool_options(choice, parallel)
        return ToolOptions()
    if not body.tools:  # clients without tools send an empty array
        if choice not in (None, "none", "auto"):
            raise invalid_request(
                "tool_choice", "tool_choice requires a tool, but there are no tools"
            )
        return ToolOptions()
    tools = tuple(
        build_function(tool.function, f"tools.{index}.function")
        for index, tool in enumerate(body.tools)
    )
    check_tool_names(tools)
    options = ToolOptions(tools=tools, parallel=parallel is not False)
    match choice:
        case tool_schema.NamedFunction(function=function):
            name = _find_name(function, tools, "tool_choice.function.name")
            return replace(options, choice=NamedToolChoice(name=name))
        case tool_schema.AllowedTools(allowed_tools=allowed):
            at = "tool_choice.allowed_tools.tools"
            names = {
                _find_name(tool.function, tools, f"{at}.{index}.function.name")
                for index, tool in enumerate(allowed.tools)
            }
            return replace(
                options,
                choice=allowed.mode,
                tools=tuple(tool for tool in tools if tool.name in names),
            )
        case _:
            return replace(options, choice=choice or "auto")


def reject_tool_options(choice: object, parallel: bool | None) -> None:
    """Raises AppError(INVALID) if a request without tools contains options for tools."""
    if choice not in (None, "none"):
        raise invalid_request("tool_choice", "tool_choice is only allowed with tools")
    if parallel is not None:
        raise invalid_request(
            "parallel_tool_calls", "parallel_tool_calls is only allowed with tools"
        )


def check_tool_names(tools: Iterable[Tool]) -> None:
    """Raises AppError(INVALID) if two tools have the same name."""
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise invalid_request(f"{tool.param}.name", f"two tools have the name {tool.name}")
        names.add(tool.name)


def build_function(function: tool_schema.Function, at: str) -> Tool:
    """at: the path of the function."""
    return Tool(
        name=function.name,
        description=function.description,
        parameters=decode_object(function.parameters, f"{at}.parameters") or NO_PARAMETERS,
        strict=function.strict or False,
        param=at,
    )


def unknown_tool_error(path: str, name: str) -> AppError:
    """Returns the error for a `tool_choice` that refers to an unknown tool."""
    return invalid_request(
        path, f"{path} must be the name of one of the tools, not {quote_value(name)}"
    )


def _find_name(function: tool_schema.FunctionReference, tools: Sequence[Tool], path: str) -> str:
    if all(tool.name != function.name for tool in tools):
        raise unknown_tool_error(path, function.name)
    return function.name
