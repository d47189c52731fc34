"""OpenAI's tools: converts JSON to functions that the model may or must call.

Knows: the fields `tools`, `tool_choice` and `parallel_tool_calls`. Must not know: the syntax of
calls, the supported schemas.

Only functions are supported. A tool of any other type is rejected with an error that contains the
type.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from app.api.fields import Fields, invalid_request, quote_value
from app.core.errors import AppError
from app.core.requests import NamedToolChoice, Tool, ToolChoice

# OpenAI does not allow dots in names, but the function calling benchmark BFCL and its clients use
# them.
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]+", re.ASCII)
MAX_NAME_CHARS = 128  # Anthropic's limit; OpenAI's is 64

NO_PARAMETERS = {"type": "object", "properties": dict[str, Any]()}


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


def read_tool_options(fields: Fields) -> ToolOptions:
    """Reads the tools of a chat completion request, in which each function is a nested object."""
    given = fields.array("tools")
    choice, parallel = fields.value("tool_choice"), fields.boolean("parallel_tool_calls")
    if given is None:
        reject_tool_options(choice, parallel)
        return ToolOptions()
    if not given:  # clients without tools send an empty array
        if choice not in (None, "none", "auto"):
            raise invalid_request(
                "tool_choice", "tool_choice requires a tool, but there are no tools"
            )
        return ToolOptions()
    tools = read_tools(given, _nested_function)
    reader = _make_name_reader(tools)
    chosen, tools = read_tool_choice(choice, tools, reader, ("function",), nested=True)
    return ToolOptions(tools=tools, choice=chosen, parallel=parallel is not False)


def reject_tool_options(choice: object, parallel: bool | None) -> None:
    """Raises AppError(INVALID) if a request without tools contains options for tools."""
    if choice not in (None, "none"):
        raise invalid_request("tool_choice", "tool_choice is only allowed with tools")
    if parallel is not None:
        raise invalid_request(
            "parallel_tool_calls", "parallel_tool_calls is only allowed with tools"
        )


def read_tools(given: list[object], function: Callable[[Fields], Tool]) -> tuple[Tool, ...]:
    """Reads the array of tools. function: reads one tool after its type was checked."""
    tools: list[Tool] = []
    for place, value in enumerate(given):
        fields = Fields.from_value(value, f"tools.{place}")
        kind = fields.required_string("type")
        if kind != "function":
            path = fields.path("type")
            raise invalid_request(path, f"{path} must be 'function', not {quote_value(kind)}")
        tool = function(fields)
        fields.ignore_unknown("cache_control")
        tools.append(tool)
    check_tool_names(tools)
    return tuple(tools)


def check_tool_names(tools: Iterable[Tool]) -> None:
    """Raises AppError(INVALID) if two tools have the same name."""
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise invalid_request(f"{tool.param}.name", f"two tools have the name {tool.name}")
        names.add(tool.name)


def read_function(fields: Fields, at: str) -> Tool:
    """Reads the fields of a function."""
    return Tool(
        name=read_tool_name(fields),
        description=fields.string("description"),
        parameters=fields.mapping("parameters") or NO_PARAMETERS,
        strict=fields.boolean("strict") or False,
        param=at,
    )


def read_tool_name(fields: Fields) -> str:
    """Reads the name of a tool. Raises AppError(INVALID)."""
    name = fields.required_string("name")
    if len(name) > MAX_NAME_CHARS or not FUNCTION_NAME.fullmatch(name):
        path = fields.path("name")
        raise invalid_request(
            path,
            f"{path} must be 1 to {MAX_NAME_CHARS} letters, digits, underscores, hyphens or dots, "
            f"not {quote_value(name)}",
        )
    return name


def _nested_function(tool: Fields) -> Tool:
    at = tool.path("function")
    function = Fields.from_value(tool.required("function"), at)
    read = read_function(function, at)
    function.ignore_unknown()
    return read


def unknown_tool_error(path: str, name: str) -> AppError:
    """Returns the error for a `tool_choice` that refers to an unknown tool."""
    return invalid_request(
        path, f"{path} must be the name of one of the tools, not {quote_value(name)}"
    )


ReadToolName = Callable[[Fields, str], str | None]
"""Reads a tool name from an object of this type; returns None for a tool that is hidden from the
model."""


def read_tool_choice(
    value: object,
    tools: tuple[Tool, ...],
    read_name: ReadToolName,
    kinds: Sequence[str],
    *,
    nested: bool = False,
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Reads `tool_choice`. Returns the tool choice and the remaining tools. kinds: the tool types
    that it may refer to. nested: whether allowed tools are in nested objects, as in chat
    completions.
    """
    if value is None:
        return "auto", tools
    if isinstance(value, str):
        choice = Fields({"tool_choice": value})
        word = choice.required_one_of("tool_choice", ("none", "auto", "required"))
        return cast("Literal['none', 'auto', 'required']", word), tools
    fields = Fields.from_value(value, "tool_choice")
    kind = fields.required_one_of("type", (*kinds, "allowed_tools"))
    if kind != "allowed_tools":
        name = read_name(fields, kind)
        if name is None:
            raise invalid_request(
                "tool_choice.type", "tool_choice requires a tool that this server does not run"
            )
        fields.check_unknown()
        return NamedToolChoice(name=name), tools
    path = fields.path("allowed_tools")
    allowed = Fields.from_value(fields.required("allowed_tools"), path) if nested else fields
    mode, left = _read_allowed_tools(allowed, read_name, kinds)
    allowed.check_unknown()
    fields.check_unknown()
    return mode, tuple(tool for tool in tools if tool.name in left)


def _read_allowed_tools(
    fields: Fields, read_name: ReadToolName, kinds: Sequence[str]
) -> tuple[Literal["auto", "required"], set[str]]:
    """Reads the subset of tools allowed for this response."""
    mode = fields.required_one_of("mode", ("auto", "required"))
    fields.required("tools")
    given = fields.array("tools") or []
    path = fields.path("tools")
    if not given:
        raise invalid_request(path, f"{path} must contain at least one tool")
    left: set[str] = set()
    for place, value in enumerate(given):
        tool = Fields.from_value(value, f"{path}.{place}")
        name = read_name(tool, tool.required_one_of("type", kinds))
        if name is not None:
            left.add(name)
        tool.check_unknown()
    if mode == "required" and not left:
        raise invalid_request(path, f"{path} must contain a tool that the model may call")
    return cast("Literal['auto', 'required']", mode), left


def _make_name_reader(tools: Sequence[Tool]) -> ReadToolName:
    """Returns the reader for chat completions, in which the name is in a nested object."""
    names = {tool.name for tool in tools}

    def read(fields: Fields, kind: str) -> str:
        inner = Fields.from_value(fields.required(kind), fields.path(kind))
        name = inner.required_string("name")
        if name not in names:
            raise unknown_tool_error(inner.path("name"), name)
        inner.check_unknown()
        return name

    return read
