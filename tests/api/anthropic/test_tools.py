"""Anthropic's tools."""

from typing import Any

import pytest

from app.core.requests import NamedToolChoice
from tests.api.anthropic.requests import body, parse_body, rejection, send
from tests.rows import rows

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


def test_a_function_is_read():
    given = {**WEATHER, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}
    request = parse_body(body(tools=[given, {"name": "g", "input_schema": {}}]))
    first, second = request.tools
    assert (first.name, first.description, first.strict) == ("get_weather", "The weather.", True)
    assert (first.parameters, first.param) == (SCHEMA, "tools.0")
    assert second.parameters["type"] == "object"
    assert request.tool_choice == "auto"
    assert request.tool_schemas == "prefer"


def test_examples_become_part_of_the_description():
    [tool] = parse_body(body(tools=[{**WEATHER, "input_examples": [{"city": "Oslo"}]}])).tools
    assert tool.description == 'The weather.\nExamples of arguments:\n{"city":"Oslo"}'


@pytest.mark.parametrize(
    ("kind", "name", "argument"),
    [
        ("bash_20250124", "bash", "command"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "old_str"),
        ("memory_20250818", "memory", "new_path"),
        ("computer_20250124", "computer", "coordinate"),
    ],
)
def test_a_tool_that_the_client_runs_has_the_schema_of_its_type(
    kind: str, name: str, argument: str
):
    size = {"display_width_px": 800, "display_height_px": 600}
    [tool] = parse_body(body(tools=[{"type": kind, **size}])).tools
    assert tool.name == name
    assert argument in tool.parameters["properties"]
    assert (tool.description or "").endswith("The screen has 800 x 600 pixels.")
    [named] = parse_body(body(tools=[{"type": kind, "name": "mine"}])).tools
    assert named.name == "mine"


def test_tools_of_anthropics_servers_are_omitted_with_a_notice():
    tools = [SEARCH, WEATHER, {"type": "new_20991231"}, {"type": "code_execution_20250825"}]
    reply, generate = send(body(tools=tools))
    assert [tool.name for tool in generate.opened[0].tools] == ["get_weather"]
    assert reply.headers["x-mlxrunner-notice"] == (
        "omitted from the prompt: tools that Anthropic's servers run "
        "(code_execution, unknown, web_search)"
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "get_weather"}, NamedToolChoice(name="get_weather")),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_each_choice_is_applied(choice: Any, expected: Any, parallel: bool):
    """llama.cpp drops the name of the tool and `none`; Ollama ignores the field."""
    choice = {**choice, "disable_parallel_tool_use": not parallel}
    request = parse_body(body(tools=[WEATHER], tool_choice=choice))
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, parallel)


@rows(
    ("fields", "path"),
    [
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{**WEATHER, "input_examples": [1]}]}, "tools.0.input_examples"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ],
)
def test_an_invalid_tool_is_rejected_with_its_path(fields: Any, path: str):
    assert rejection(body(**fields)).startswith(path)


def test_choices_without_tools_are_accepted():
    assert parse_body(body(tool_choice={"type": "auto"})).tools == ()
