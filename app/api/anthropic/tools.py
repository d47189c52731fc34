"""Anthropic's tools: converts JSON to functions that the model may or must call.

Knows: functions, tools with a schema implied by their type, server tools, `tool_choice`. Must not
know: the syntax of calls, the supported schemas.

Client tools of any type are converted to functions. Server tools, which run on Anthropic's servers,
are omitted with a notice. A request that requires a call to a server tool is rejected.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.api.fields import Fields, as_mapping, invalid_request, quote_value
from app.api.openai.tools import (
    NO_PARAMETERS,
    ToolOptions,
    check_tool_names,
    read_tool_name,
    unknown_tool_error,
)
from app.core.errors import AppError
from app.core.requests import NamedToolChoice, Tool, ToolChoice

# `web_search_20250305` is a version of `web_search`.
_VERSION_SUFFIX = re.compile(r"_\d{8}$", re.ASCII)

# Attributes of tools without effect. Every tool is in the prompt, and every prefix is cached.
_ACCEPTED_ATTRIBUTES = (
    "allowed_callers",
    "cache_control",
    "defer_loading",
    "display_number",
    "eager_input_streaming",
    "enable_zoom",
    "max_characters",
)

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
class ReadTools:
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


def read_tools(fields: Fields) -> ReadTools:
    """Reads `tools` and `tool_choice`. Raises AppError(INVALID)."""
    tools: list[Tool] = []
    omitted: dict[str, str] = {}  # name → type
    for place, value in enumerate(fields.array("tools") or []):
        tool = Fields.from_value(value, f"tools.{place}")
        kind = _VERSION_SUFFIX.sub("", tool.string("type") or "custom")
        if kind in _CLIENT_TOOLS:
            tools.append(_read_client_tool(tool, _CLIENT_TOOLS[kind], f"tools.{place}"))
        elif kind == "custom" or tool.value("input_schema") is not None:
            tools.append(read_tool(tool, f"tools.{place}"))
        else:
            hosted = kind if kind in _HOSTED_TYPES else "unknown"
            omitted[tool.string("name") or hosted] = hosted
            continue  # its options are meaningless here
        tool.ignore_unknown(*_ACCEPTED_ATTRIBUTES)
    check_tool_names(tools)
    choice, parallel = _read_choice(fields.nested("tool_choice"), tools, omitted)
    return ReadTools(
        options=ToolOptions(tools=tuple(tools), choice=choice, parallel=parallel),
        omitted=tuple(sorted(set(omitted.values()))),
    )


def read_tool(fields: Fields, path: str) -> Tool:
    """Reads a function definition."""
    fields.required("input_schema")
    description = fields.string("description")
    examples = fields.array("input_examples")
    if examples:
        texts = [orjson.dumps(_as_example(one, fields)).decode() for one in examples]
        description = "\n".join([*filter(None, [description]), "Examples of arguments:", *texts])
    return Tool(
        name=read_tool_name(fields),
        description=description,
        parameters=fields.mapping("input_schema") or NO_PARAMETERS,
        strict=fields.boolean("strict") or False,
        param=path,
    )


def _as_example(value: object, fields: Fields) -> Mapping[str, Any]:
    return as_mapping(value, fields.path("input_examples"))


def _read_client_tool(fields: Fields, tool: _ClientTool, path: str) -> Tool:
    description = tool.description
    size = [fields.integer(f"display_{side}_px", 1, 1 << 20) for side in ("width", "height")]
    if None not in size:
        description += f" The screen has {size[0]} x {size[1]} pixels."
    return Tool(
        name=read_tool_name(fields) if fields.value("name") is not None else tool.name,
        description=description,
        parameters=tool.parameters,
        strict=fields.boolean("strict") or False,
        param=path,
    )


def _read_choice(
    fields: Fields | None, tools: Sequence[Tool], omitted: Mapping[str, str]
) -> tuple[ToolChoice, bool]:
    """Returns the tool choice, and whether a response may contain several calls."""
    if fields is None:
        return "auto", True
    kind = fields.required_one_of("type", ("auto", "any", "tool", "none"))
    parallel = fields.boolean("disable_parallel_tool_use") is not True
    fields.string("name")  # only "tool" requires it
    fields.check_unknown()
    if kind == "tool":
        name = fields.required_string("name")
        if all(tool.name != name for tool in tools):
            raise _unknown_tool(fields.path("name"), name, hosted=name in omitted)
        return NamedToolChoice(name=name), parallel
    if kind == "any":
        if not tools:
            raise invalid_request(
                "tool_choice", "tool_choice: any requires a tool that the client can run"
            )
        return "required", parallel
    return ("none" if kind == "none" else "auto"), parallel


def _unknown_tool(path: str, name: str, *, hosted: bool) -> AppError:
    if hosted:
        return invalid_request(
            path,
            f"{path}: {quote_value(name)} is a tool that Anthropic's servers run; this server does "
            "not: define a function in tools",
        )
    return unknown_tool_error(path, name)


def describe_addition(fields: Fields) -> str:
    """Describes a tool added by a system message. Chat templates list tools only at the start,
    where a change would invalidate the cached prefix."""
    tool, path = _read_change(fields)
    name = tool.string("tool_name") or read_tool_name(tool)
    if tool.value("input_schema") is None:
        return f"The tool {name} is available from here on."
    function = read_tool(tool, path)
    schema = orjson.dumps(function.parameters).decode()
    described = f": {function.description}" if function.description else "."
    return f"The tool {name} is available from here on{described}\nArguments: {schema}"


def describe_removal(fields: Fields) -> str:
    tool, _ = _read_change(fields)
    name = tool.string("tool_name") or read_tool_name(tool)
    return f"The tool {name} is not available from here on."


def _read_change(fields: Fields) -> tuple[Fields, str]:
    path = fields.path("tool")
    return Fields.from_value(fields.required("tool"), path), path


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
