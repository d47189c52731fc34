"""OpenAI's tools: converts their structs to functions that the model may or must call.

Knows: the fields `tools`, `tool_choice` and `parallel_tool_calls`. Must not know: the syntax of
calls, the supported schemas.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.api.fields import invalid_request, quote_value
from app.api.schema import tools as schema
from app.api.schema.decode import decode_object
from app.api.schema.openai import ChatBody
from app.core.errors import AppError
from app.core.requests import NamedToolChoice, Tool, ToolChoice

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
        case schema.NamedFunction(function=function):
            name = _find_name(function, tools, "tool_choice.function.name")
            return replace(options, choice=NamedToolChoice(name=name))
        case schema.AllowedTools(allowed_tools=allowed):
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


def build_function(function: schema.Function, at: str) -> Tool:
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


def _find_name(function: schema.FunctionReference, tools: Sequence[Tool], path: str) -> str:
    if all(tool.name != function.name for tool in tools):
        raise unknown_tool_error(path, function.name)
    return function.name
