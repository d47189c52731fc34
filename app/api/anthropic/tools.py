"""Anthropic's tools: converts their structs to functions that the model may or must call.

Knows: functions, tools with a schema implied by their type, server tools, `tool_choice`. Must not
know: the syntax of calls, the supported schemas.

Client tools of any type are converted to functions. Server tools, which run on Anthropic's servers,
are omitted with a notice. A request that requires a call to a server tool is rejected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from msgspec import Raw

from app.api.fields import invalid_request, quote_value
from app.api.openai.chat import NO_PARAMETERS, ToolOptions, check_tool_names, unknown_tool_error
from app.api.schema.anthropic import (
    AnthropicTool,
    AnthropicToolChoice,
    ChangedTool,
    MessagesBody,
    get_tool_kind,
)
from app.api.schema.decode import decode_object, is_null, require
from app.core.errors import AppError
from app.core.requests import NamedToolChoice, Tool, ToolChoice

# The types of server tools, and of toolsets without a published schema.
_HOSTED_TYPES = (
    "advisor",
    "browser_toolset",
    "code_execution",
    "computer_toolset",
    "mcp_toolset",
    "tool_search_tool_bm25",
    "tool_search_tool_regex",
    "web_fetch",
    "web_search",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTools:
    """The tools of a request. omitted: the types of the omitted tools, with the names used in this
    module."""

    options: ToolOptions
    omitted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClientTool:
    """A client tool with a schema implied by its type."""

    name: str
    description: str
    parameters: Mapping[str, Any]


def build_tools(body: MessagesBody) -> MessageTools:
    """Converts `tools` and `tool_choice`. Raises AppError(INVALID)."""
    tools: list[Tool] = []
    omitted: dict[str, str] = {}  # name → type
    for index, tool in enumerate(body.tools or ()):
        kind, path = get_tool_kind(tool.type), f"tools.{index}"
        if (client_tool := _CLIENT_TOOLS.get(kind)) is not None:
            tools.append(_build_client_tool(tool, client_tool, path))
        elif kind == "custom" or not is_null(tool.input_schema):
            tools.append(_build_function(tool, path))
        else:
            hosted = kind if kind in _HOSTED_TYPES else "unknown"
            omitted[tool.name or hosted] = hosted
    check_tool_names(tools)
    choice, parallel = _build_choice(body.tool_choice, tools, omitted)
    return MessageTools(
        options=ToolOptions(tools=tuple(tools), choice=choice, parallel=parallel),
        omitted=tuple(sorted(set(omitted.values()))),
    )


def _build_function(tool: AnthropicTool, path: str) -> Tool:
    parameters = decode_object(tool.input_schema, f"{path}.input_schema")
    description = tool.description
    if tool.input_examples:
        texts = [_encode_example(one, f"{path}.input_examples") for one in tool.input_examples]
        description = "\n".join([*filter(None, [description]), "Examples of arguments:", *texts])
    return Tool(
        name=require(tool.name, f"{path}.name"),
        description=description,
        parameters=require(parameters, f"{path}.input_schema") or NO_PARAMETERS,
        strict=tool.strict or False,
        param=path,
    )


def _encode_example(value: Raw, path: str) -> str:
    return orjson.dumps(require(decode_object(value, path), path)).decode()


def _build_client_tool(tool: AnthropicTool, implied: _ClientTool, path: str) -> Tool:
    description, width, height = implied.description, tool.display_width_px, tool.display_height_px
    if width is not None and height is not None:
        description += f" The screen has {width} x {height} pixels."
    return Tool(
        name=implied.name if tool.name is None else tool.name,
        description=description,
        parameters=implied.parameters,
        strict=tool.strict or False,
        param=path,
    )


def _build_choice(
    choice: AnthropicToolChoice | None, tools: Sequence[Tool], omitted: Mapping[str, str]
) -> tuple[ToolChoice, bool]:
    """Returns the tool choice, and whether a response may contain several calls."""
    if choice is None:
        return "auto", True
    parallel = choice.disable_parallel_tool_use is not True
    match choice.type:
        case "tool":
            path = "tool_choice.name"
            name = require(choice.name, path)
            if all(tool.name != name for tool in tools):
                raise _unknown_tool(path, name, hosted=name in omitted)
            return NamedToolChoice(name=name), parallel
        case "any":
            if not tools:
                raise invalid_request(
                    "tool_choice", "tool_choice: any requires a tool that the client can run"
                )
            return "required", parallel
        case kind:
            return kind, parallel


def _unknown_tool(path: str, name: str, *, hosted: bool) -> AppError:
    if hosted:
        return invalid_request(
            path,
            f"{path}: {quote_value(name)} is a tool that Anthropic's servers run; this server does "
            "not: define a function in tools",
        )
    return unknown_tool_error(path, name)


def describe_addition(tool: ChangedTool, path: str) -> str:
    """Describes a tool added by a system message. Chat templates list tools only at the start,
    where a change would invalidate the cached prefix."""
    name = _get_changed_name(tool, path)
    if is_null(tool.input_schema):
        return f"The tool {name} is available from here on."
    function = _build_function(tool, path)
    schema = orjson.dumps(function.parameters).decode()
    described = f": {function.description}" if function.description else "."
    return f"The tool {name} is available from here on{described}\nArguments: {schema}"


def describe_removal(tool: ChangedTool, path: str) -> str:
    return f"The tool {_get_changed_name(tool, path)} is not available from here on."


def _get_changed_name(tool: ChangedTool, path: str) -> str:
    return tool.tool_name or require(tool.name, f"{path}.name")


def _schema(required: Sequence[str], **properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str) -> Mapping[str, Any]:
    return {"type": "string", "description": description}


def _pair(description: str) -> Mapping[str, Any]:
    whole = {"type": "integer"}
    return {
        "type": "array",
        "items": whole,
        "minItems": 2,
        "maxItems": 2,
        "description": description,
    }


def _edit_properties(*more: str) -> dict[str, Mapping[str, Any]]:
    commands = ["view", "create", "str_replace", "insert", *more]
    return {
        "command": {"type": "string", "enum": commands},
        "path": _text("Path of the file or directory."),
        "file_text": _text("For create: the content of the new file."),
        "old_str": _text("For str_replace: the text to replace, which must occur once."),
        "new_str": _text("For str_replace and insert: the new text."),
        "insert_line": {"type": "integer", "description": "For insert: the line to insert after."},
        "insert_text": _text("For insert: the text to insert."),
        "view_range": _pair("For view: the first and the last line; -1 is the end of the file."),
    }


_CLIENT_TOOLS: Mapping[str, _ClientTool] = {
    "bash": _ClientTool(
        name="bash",
        description="Runs a command in a persistent bash session.",
        parameters=_schema(
            (),
            command=_text("The command to run; required unless the session is restarted."),
            restart={"type": "boolean", "description": "Restarts the session."},
        ),
    ),
    "text_editor": _ClientTool(
        name="str_replace_based_edit_tool",
        description="Views, creates and edits text files.",
        parameters=_schema(("command", "path"), **_edit_properties()),
    ),
    "memory": _ClientTool(
        name="memory",
        description="Reads and changes files in /memories, which outlive a conversation.",
        parameters=_schema(
            ("command",),
            **_edit_properties("delete", "rename"),
            old_path=_text("For rename: the path of the file."),
            new_path=_text("For rename: its new path."),
        ),
    ),
    "computer": _ClientTool(
        name="computer",
        description="Controls a computer with a screen, a mouse and a keyboard.",
        parameters=_schema(
            ("action",),
            action={
                "type": "string",
                "enum": [
                    "screenshot",
                    "cursor_position",
                    "mouse_move",
                    "left_click",
                    "left_click_drag",
                    "left_mouse_down",
                    "left_mouse_up",
                    "right_click",
                    "middle_click",
                    "double_click",
                    "triple_click",
                    "scroll",
                    "type",
                    "key",
                    "hold_key",
                    "wait",
                    "zoom",
                ],
            },
            coordinate=_pair("The position x, y in pixels."),
            start_coordinate=_pair("For left_click_drag: where the drag starts."),
            text=_text("For type: the text; for key and hold_key: the keys."),
            scroll_direction={"type": "string", "enum": ["up", "down", "left", "right"]},
            scroll_amount={"type": "integer"},
            duration={"type": "number", "description": "For wait and hold_key: seconds."},
            region={
                "type": "array",
                "items": {"type": "integer"},
                "description": "For zoom: x0, y0, x1, y1.",
            },
        ),
    ),
}
