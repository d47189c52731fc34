"""Tools and tool_choice."""

import json
from typing import Any

import pytest

from app.api.openai.chat import NO_PARAMETERS, ToolOptions, build_tool_options
from app.api.schema.openai import CHAT
from app.core.errors import AppError, ErrorKind
from app.core.requests import NamedToolChoice, Tool
from tests.rows import rows

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def read(**body: Any) -> ToolOptions:
    body = {"messages": [{"role": "user"}], **body}
    return build_tool_options(CHAT.decode(json.dumps(body).encode()))


def allowed_tools(*names: str, mode: str = "auto") -> Any:
    tools = [function(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def build_nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_function_keeps_its_fields():
    definition = function("get_weather", description="Of a city.", parameters=SCHEMA, strict=True)
    (tool,) = read(tools=[definition]).tools
    assert tool == Tool(
        name="get_weather",
        description="Of a city.",
        parameters=SCHEMA,
        strict=True,
        param="tools.0.function",
    )


@pytest.mark.parametrize("more", [{}, {"parameters": None}, {"description": None, "strict": None}])
def test_a_function_needs_only_a_name(more: Any):
    (tool,) = read(tools=[function("now", **more)]).tools
    assert (tool.name, tool.description, tool.strict) == ("now", None, False)
    assert tool.parameters == NO_PARAMETERS


@pytest.mark.parametrize("name", ["a", "math.factorial", "get-it", "A_1", "x" * 128])
def test_function_names_may_have_dots_and_dashes(name: str):
    assert read(tools=[function(name)]).tools[0].name == name


@pytest.mark.parametrize(
    "more", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}]
)
def test_an_empty_list_of_tools_means_no_tools(more: Any):
    assert read(tools=[], **more) == ToolOptions()


def test_tool_choice_is_auto_by_default():
    tool_options = read(tools=[function()])
    assert (tool_options.choice, tool_options.parallel, tool_options.must_call) == (
        "auto",
        True,
        False,
    )
    assert read() == ToolOptions()
    assert read(tool_choice="none", parallel_tool_calls=None) == ToolOptions()


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_tool_choice_may_be_a_word(choice: str):
    tool_options = read(tools=[function()], tool_choice=choice)
    assert tool_options.choice == choice
    assert tool_options.must_call == (choice == "required")


def test_tool_choice_may_be_a_function():
    tool_options = read(tools=[function("f"), function("g")], tool_choice=function("g"))
    assert tool_options.choice == NamedToolChoice(name="g")
    assert tool_options.must_call
    assert [tool.name for tool in tool_options.tools] == ["f", "g"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tool_choice_may_allow_a_subset_of_the_tools(mode: str):
    tools = [function("f"), function("g"), function("h")]
    tool_options = read(tools=tools, tool_choice=allowed_tools("h", "f", mode=mode))
    assert tool_options.choice == mode
    assert [tool.name for tool in tool_options.tools] == ["f", "h"]


def test_parallel_tool_calls_can_be_disabled():
    assert not read(tools=[function()], parallel_tool_calls=False).parallel
    assert read(tools=[function()], parallel_tool_calls=True).parallel


@pytest.mark.parametrize(
    ("more", "constrained"),
    [
        ({}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": function("f")}, True),
        ({"tools": [function("f"), function("g", strict=True)]}, True),
        ({"tools": [function("f", strict=True)], "tool_choice": "none"}, False),
    ],
)
def test_required_calls_and_strict_tools_constrain_the_output(more: Any, constrained: bool):
    assert read(**{"tools": [function("f")], **more}).constrained is constrained


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools.0"),
    ({"tools": [{}]}, "tools.0.type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools.0.function"),
    ({"tools": [function(None)]}, "tools.0.function.name"),
    ({"tools": [function("")]}, "tools.0.function.name"),
    ({"tools": [function("x" * 129)]}, "tools.0.function.name"),
    ({"tools": [function("a b")]}, "tools.0.function.name"),
    ({"tools": [function("é")]}, "tools.0.function.name"),
    ({"tools": [function("f\n")]}, "tools.0.function.name"),
    ({"tools": [function("f"), function("f")]}, "tools.1.function.name"),
    ({"tools": [function(description=5)]}, "tools.0.function.description"),
    ({"tools": [function(parameters=[])]}, "tools.0.function.parameters"),
    ({"tools": [function(parameters="{}")]}, "tools.0.function.parameters"),
    ({"tools": [function(parameters=build_nested_schema(300))]}, "tools.0.function.parameters"),
    ({"tools": [function(strict="yes")]}, "tools.0.function.strict"),
    ({"tools": [function()], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [function()], "tool_choice": ["f"]}, "tool_choice"),
    ({"tools": [function()], "tool_choice": {}}, "tool_choice.type"),
    ({"tools": [function()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [function()], "tool_choice": function("g")}, "tool_choice.function.name"),
    ({"tools": [function()], "tool_choice": function("f", names=1)}, "tool_choice.function.names"),
    ({"tools": [function()], "tool_choice": {**function("f"), "typ": 1}}, "tool_choice.typ"),
    ({"tools": [function()], "tool_choice": allowed_tools()}, "tool_choice.allowed_tools.tools"),
    (
        {"tools": [function()], "tool_choice": allowed_tools("g")},
        "tool_choice.allowed_tools.tools.0.function.name",
    ),
    (
        {"tools": [function()], "tool_choice": allowed_tools("f", mode="none")},
        "tool_choice.allowed_tools.mode",
    ),
    ({"tools": [function()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": function()}, "tool_choice"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
]


@rows(("body", "param"), WRONG)
def test_an_invalid_tool_is_named(body: Any, param: str):
    with pytest.raises(AppError) as caught:
        read(**body)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)
