"""OpenAI's tools: from JSON to functions that the model may or must call.

Knows the fields `tools`, `tool_choice` and `parallel_tool_calls`. Only functions are tools here; a
tool of another kind is refused by its type. Must not know: how calls are written or read, or
whether a function's parameters can be followed as a schema.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, cast

from app.api.fields import Fields, invalid, shown
from app.core.requests import NamedTool, Tool, ToolChoice

# OpenAI has no dot in names; the function calling benchmarks that clients imitate (BFCL) have.
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}", re.ASCII)

NO_PARAMETERS = {"type": "object", "properties": dict[str, Any]()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """Functions, and how they are to be used. constrained: a schema, or the wish for a call, limits
    what the model may say."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True

    @property
    def must_call(self) -> bool:
        return self.choice == "required" or isinstance(self.choice, NamedTool)

    @property
    def constrained(self) -> bool:
        return self.must_call or (self.choice != "none" and any(t.strict for t in self.tools))


def read_toolbox(fields: Fields) -> Toolbox:
    """Of a chat completion, where a function stands in an object of its own."""
    given = fields.array("tools")
    choice, parallel = fields.value("tool_choice"), fields.boolean("parallel_tool_calls")
    if given is None:
        check_toolless(choice, parallel)
        return Toolbox()
    tools = read_tools(given, _nested_function)
    chosen, tools = read_choice(choice, tools, nested=True)
    return Toolbox(tools=tools, choice=chosen, parallel=parallel is not False)


def check_toolless(choice: object, parallel: bool | None) -> None:
    """Of a request without tools: nothing may speak of them."""
    if choice not in (None, "none"):
        raise invalid("tool_choice", "tool_choice is only allowed with tools")
    if parallel is not None:
        raise invalid("parallel_tool_calls", "parallel_tool_calls is only allowed with tools")


def read_tools(given: list[object], function: Callable[[Fields], Tool]) -> tuple[Tool, ...]:
    """`function` reads one tool, whose type has been read."""
    if not given:
        raise invalid("tools", "tools must hold at least one tool: leave it out for none")
    tools: list[Tool] = []
    names: set[str] = set()
    for place, value in enumerate(given):
        fields = Fields.of(value, f"tools.{place}")
        kind = fields.required_string("type")
        if kind != "function":
            path = fields.path("type")
            raise invalid(path, f"{path} must be 'function', not {shown(kind)}")
        tool = function(fields)
        fields.close()
        if tool.name in names:
            raise invalid(f"{tool.at}.name", f"two tools have the name {tool.name}")
        names.add(tool.name)
        tools.append(tool)
    return tuple(tools)


def read_function(fields: Fields, at: str) -> Tool:
    """A function's own fields."""
    name = fields.required_string("name")
    if not NAME.fullmatch(name):
        path = fields.path("name")
        raise invalid(
            path,
            f"{path} must be 1 to 64 letters, digits, underscores, hyphens or dots, "
            f"not {shown(name)}",
        )
    return Tool(
        name=name,
        description=fields.string("description"),
        parameters=fields.mapping("parameters") or NO_PARAMETERS,
        strict=fields.boolean("strict") or False,
        at=at,
    )


def _nested_function(tool: Fields) -> Tool:
    at = tool.path("function")
    function = Fields.of(tool.required("function"), at)
    read = read_function(function, at)
    function.close()
    return read


def read_choice(
    value: object, tools: tuple[Tool, ...], *, nested: bool
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """`tool_choice`, and the tools that it leaves. nested: names stand in objects of their own, as
    in chat completions."""
    names = {tool.name for tool in tools}
    if value is None:
        return "auto", tools
    if isinstance(value, str):
        choice = Fields({"tool_choice": value})
        word = choice.required_word("tool_choice", ("none", "auto", "required"))
        return cast("Literal['none', 'auto', 'required']", word), tools
    fields = Fields.of(value, "tool_choice")
    kind = fields.required_word("type", ("function", "allowed_tools"))
    if kind == "function":
        name = _name(fields, names, nested=nested)
        fields.close()
        return NamedTool(name=name), tools
    path = fields.path("allowed_tools")
    allowed = Fields.of(fields.required("allowed_tools"), path) if nested else fields
    choice, left = _allowed(allowed, names, nested=nested)
    allowed.close()
    fields.close()
    return choice, tuple(tool for tool in tools if tool.name in left)


def _allowed(
    fields: Fields, names: Collection[str], *, nested: bool
) -> tuple[Literal["auto", "required"], set[str]]:
    """Some of the tools, for this one answer. The others are as if they had not been given."""
    mode = fields.required_word("mode", ("auto", "required"))
    fields.required("tools")
    given = fields.array("tools") or []
    path = fields.path("tools")
    if not given:
        raise invalid(path, f"{path} must hold at least one tool")
    left: set[str] = set()
    for place, value in enumerate(given):
        tool = Fields.of(value, f"{path}.{place}")
        tool.required_word("type", ("function",))
        left.add(_name(tool, names, nested=nested))
        tool.close()
    return cast("Literal['auto', 'required']", mode), left


def _name(fields: Fields, names: Collection[str], *, nested: bool) -> str:
    """The name of one of the tools."""
    path = fields.path("function")
    inner = Fields.of(fields.required("function"), path) if nested else fields
    name = inner.required_string("name")
    if name not in names:
        path = inner.path("name")
        raise invalid(path, f"{path} must be the name of one of the tools, not {shown(name)}")
    if nested:
        inner.close()
    return name
