"""OpenAI's tools: from JSON to functions that the model may or must call.

Knows: the fields `tools`, `tool_choice` and `parallel_tool_calls`. Must not know: how calls are
written or parsed, whether a function's parameters are a supported schema.

Only functions are supported; a tool of another type is rejected by its type.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, cast

from app.api.fields import Fields, invalid_request, quote_value
from app.core.requests import NamedToolChoice, Tool, ToolChoice

# OpenAI allows no dot in names, but the function calling benchmark BFCL and its clients use it.
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}", re.ASCII)

NO_PARAMETERS = {"type": "object", "properties": dict[str, Any]()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """Functions and how they may be used. constrained: a schema or a required call constrains the
    output."""

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
    """Reads the tools of a chat completion, where each function is in a nested object."""
    given = fields.array("tools")
    choice, parallel = fields.value("tool_choice"), fields.boolean("parallel_tool_calls")
    if given is None:
        reject_tool_options(choice, parallel)
        return ToolOptions()
    tools = read_tools(given, _nested_function)
    chosen, tools = read_tool_choice(choice, tools, nested=True)
    return ToolOptions(tools=tools, choice=chosen, parallel=parallel is not False)


def reject_tool_options(choice: object, parallel: bool | None) -> None:
    """Raises AppError(INVALID) if a request without tools has options for them."""
    if choice not in (None, "none"):
        raise invalid_request("tool_choice", "tool_choice is only allowed with tools")
    if parallel is not None:
        raise invalid_request(
            "parallel_tool_calls", "parallel_tool_calls is only allowed with tools"
        )


def read_tools(given: list[object], function: Callable[[Fields], Tool]) -> tuple[Tool, ...]:
    """Reads the array of tools. function: reads one tool; its type was checked before."""
    if not given:
        raise invalid_request("tools", "tools must hold at least one tool: leave it out for none")
    tools: list[Tool] = []
    names: set[str] = set()
    for place, value in enumerate(given):
        fields = Fields.from_value(value, f"tools.{place}")
        kind = fields.required_string("type")
        if kind != "function":
            path = fields.path("type")
            raise invalid_request(path, f"{path} must be 'function', not {quote_value(kind)}")
        tool = function(fields)
        fields.reject_unknown()
        if tool.name in names:
            raise invalid_request(f"{tool.param}.name", f"two tools have the name {tool.name}")
        names.add(tool.name)
        tools.append(tool)
    return tuple(tools)


def read_function(fields: Fields, at: str) -> Tool:
    """Reads the fields of a function."""
    name = fields.required_string("name")
    if not FUNCTION_NAME.fullmatch(name):
        path = fields.path("name")
        raise invalid_request(
            path,
            f"{path} must be 1 to 64 letters, digits, underscores, hyphens or dots, "
            f"not {quote_value(name)}",
        )
    return Tool(
        name=name,
        description=fields.string("description"),
        parameters=fields.mapping("parameters") or NO_PARAMETERS,
        strict=fields.boolean("strict") or False,
        param=at,
    )


def _nested_function(tool: Fields) -> Tool:
    at = tool.path("function")
    function = Fields.from_value(tool.required("function"), at)
    read = read_function(function, at)
    function.reject_unknown()
    return read


def read_tool_choice(
    value: object, tools: tuple[Tool, ...], *, nested: bool
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Reads `tool_choice`; returns it with the tools that remain. nested: names are in nested
    objects, as in chat completions."""
    names = {tool.name for tool in tools}
    if value is None:
        return "auto", tools
    if isinstance(value, str):
        choice = Fields({"tool_choice": value})
        word = choice.required_one_of("tool_choice", ("none", "auto", "required"))
        return cast("Literal['none', 'auto', 'required']", word), tools
    fields = Fields.from_value(value, "tool_choice")
    kind = fields.required_one_of("type", ("function", "allowed_tools"))
    if kind == "function":
        name = _read_tool_name(fields, names, nested=nested)
        fields.reject_unknown()
        return NamedToolChoice(name=name), tools
    path = fields.path("allowed_tools")
    allowed = Fields.from_value(fields.required("allowed_tools"), path) if nested else fields
    choice, left = _read_allowed_tools(allowed, names, nested=nested)
    allowed.reject_unknown()
    fields.reject_unknown()
    return choice, tuple(tool for tool in tools if tool.name in left)


def _read_allowed_tools(
    fields: Fields, names: Collection[str], *, nested: bool
) -> tuple[Literal["auto", "required"], set[str]]:
    """Reads a subset of the tools for this response. The others are ignored."""
    mode = fields.required_one_of("mode", ("auto", "required"))
    fields.required("tools")
    given = fields.array("tools") or []
    path = fields.path("tools")
    if not given:
        raise invalid_request(path, f"{path} must hold at least one tool")
    left: set[str] = set()
    for place, value in enumerate(given):
        tool = Fields.from_value(value, f"{path}.{place}")
        tool.required_one_of("type", ("function",))
        left.add(_read_tool_name(tool, names, nested=nested))
        tool.reject_unknown()
    return cast("Literal['auto', 'required']", mode), left


def _read_tool_name(fields: Fields, names: Collection[str], *, nested: bool) -> str:
    """Reads the name of one of the tools."""
    path = fields.path("function")
    inner = Fields.from_value(fields.required("function"), path) if nested else fields
    name = inner.required_string("name")
    if name not in names:
        path = inner.path("name")
        raise invalid_request(
            path, f"{path} must be the name of one of the tools, not {quote_value(name)}"
        )
    if nested:
        inner.reject_unknown()
    return name
