"""Tools and the choice among them."""

from typing import Any

import pytest

from app.api.fields import Fields
from app.api.openai.tools import NO_PARAMETERS, ToolOptions, read_tool_options
from app.core.errors import AppError, ErrorKind
from app.core.requests import NamedToolChoice, Tool

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def read(**given: Any) -> ToolOptions:
    fields = Fields.from_value(given)
    tool_options = read_tool_options(fields)
    fields.reject_unknown()
    return tool_options


def allowed(*names: str, mode: str = "auto") -> Any:
    tools = [function(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_function_keeps_what_it_says():
    given = function("get_weather", description="Of a city.", parameters=SCHEMA, strict=True)
    (tool,) = read(tools=[given]).tools
    assert tool == Tool(
        name="get_weather",
        description="Of a city.",
        parameters=SCHEMA,
        strict=True,
        param="tools.0.function",
    )


@pytest.mark.parametrize("more", [{}, {"parameters": None}, {"description": None, "strict": None}])
def test_a_function_needs_a_name_and_nothing_else(more: Any):
    (tool,) = read(tools=[function("now", **more)]).tools
    assert (tool.name, tool.description, tool.strict) == ("now", None, False)
    assert tool.parameters == NO_PARAMETERS


@pytest.mark.parametrize("name", ["a", "math.factorial", "get-it", "A_1", "x" * 64])
def test_names_may_hold_what_benchmarks_put_into_them(name: str):
    assert read(tools=[function(name)]).tools[0].name == name


def test_the_model_chooses_unless_told_otherwise():
    box = read(tools=[function()])
    assert (box.choice, box.parallel, box.must_call) == ("auto", True, False)
    assert read() == ToolOptions()
    assert read(tool_choice="none", parallel_tool_calls=None) == ToolOptions()


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_a_choice_may_be_a_word(choice: str):
    box = read(tools=[function()], tool_choice=choice)
    assert box.choice == choice
    assert box.must_call == (choice == "required")


def test_a_choice_may_be_a_function():
    box = read(tools=[function("f"), function("g")], tool_choice=function("g"))
    assert box.choice == NamedToolChoice(name="g")
    assert box.must_call
    assert [tool.name for tool in box.tools] == ["f", "g"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_may_leave_some_of_the_tools(mode: str):
    tools = [function("f"), function("g"), function("h")]
    box = read(tools=tools, tool_choice=allowed("h", "f", mode=mode))
    assert box.choice == mode
    assert [tool.name for tool in box.tools] == ["f", "h"]


def test_one_call_at_a_time():
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
def test_calls_that_must_be_made_and_strict_tools_limit_what_is_said(more: Any, constrained: bool):
    assert read(**{"tools": [function("f")], **more}).constrained is constrained


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools.0"),
    ({"tools": [{}]}, "tools.0.type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools.0.function"),
    ({"tools": [{**function(), "x": 1}]}, "tools.0.x"),
    ({"tools": [function(None)]}, "tools.0.function.name"),
    ({"tools": [function("")]}, "tools.0.function.name"),
    ({"tools": [function("x" * 65)]}, "tools.0.function.name"),
    ({"tools": [function("a b")]}, "tools.0.function.name"),
    ({"tools": [function("é")]}, "tools.0.function.name"),
    ({"tools": [function("f\n")]}, "tools.0.function.name"),
    ({"tools": [function("f"), function("f")]}, "tools.1.function.name"),
    ({"tools": [function(description=5)]}, "tools.0.function.description"),
    ({"tools": [function(parameters=[])]}, "tools.0.function.parameters"),
    ({"tools": [function(parameters="{}")]}, "tools.0.function.parameters"),
    ({"tools": [function(parameters=nested(300))]}, "tools.0.function.parameters"),
    ({"tools": [function(strict="yes")]}, "tools.0.function.strict"),
    ({"tools": [function(x=1)]}, "tools.0.function.x"),
    ({"tools": [function()], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [function()], "tool_choice": ["f"]}, "tool_choice"),
    ({"tools": [function()], "tool_choice": {}}, "tool_choice.type"),
    ({"tools": [function()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [function()], "tool_choice": function("g")}, "tool_choice.function.name"),
    ({"tools": [function()], "tool_choice": function("f", x=1)}, "tool_choice.function.x"),
    ({"tools": [function()], "tool_choice": {**function("f"), "x": 1}}, "tool_choice.x"),
    ({"tools": [function()], "tool_choice": allowed()}, "tool_choice.allowed_tools.tools"),
    (
        {"tools": [function()], "tool_choice": allowed("g")},
        "tool_choice.allowed_tools.tools.0.function.name",
    ),
    (
        {"tools": [function()], "tool_choice": allowed("f", mode="none")},
        "tool_choice.allowed_tools.mode",
    ),
    ({"tools": [function()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": function()}, "tool_choice"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("given", "param"), WRONG)
def test_a_wrong_tool_is_named(given: Any, param: str):
    with pytest.raises(AppError) as caught:
        read(**given)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)
