"""Tools of /v1/responses: what the model sees of them, and which are omitted."""

import json
import re
from typing import Any

import pytest

from app.api.openai.chat import ToolOptions
from app.api.responses.output_items import read_custom_input
from app.api.responses.tools import DeclaredTool, ResponseTools, build_response_tools, qualify_name
from app.api.schema.responses import RESPONSE
from app.core.errors import AppError
from app.core.requests import JsonSchema, NamedToolChoice
from tests.grammar.test_llguidance_backend import accepts

NOW: dict[str, Any] = {"type": "function", "name": "now", "parameters": {"type": "object"}}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
LARK: dict[str, Any] = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers.",
    "tools": [NOW, PATCH],
}


def read(*tools: Any, **fields: Any) -> ResponseTools:
    data = json.dumps({"input": "hi", "tools": list(tools), **fields}).encode()
    return build_response_tools(RESPONSE.decode(data))


def get_rejected_field(*tools: Any, **fields: Any) -> str | None:
    with pytest.raises(AppError) as raised:
        read(*tools, **fields)
    return raised.value.param


def names(read: ResponseTools) -> list[str]:
    return [tool.name for tool in read.options.tools]


def test_the_functions_of_a_namespace_get_its_name_and_the_first_one_its_description():
    found = read(NOW, AGENTS)
    assert names(found) == ["now", "agents__now", "agents__apply_patch"]
    assert [tool.description for tool in found.options.tools] == [
        None,
        "agents: Helpers.",
        "Edits files.",
    ]
    assert found.options.tools[1].param == "tools.1.tools.0"
    assert found.find("agents__now") == DeclaredTool(name="now", namespace="agents")


def test_a_namespace_that_ends_in_the_separator_gets_no_second_one():
    assert qualify_name("read", "mcp__files__") == "mcp__files__read"


def test_a_call_without_the_namespace_is_found_if_only_one_tool_has_the_name():
    assert read(AGENTS).find("now") == DeclaredTool(name="now", namespace="agents")
    other = AGENTS | {"name": "clocks"}
    assert read(AGENTS, other).find("now") == DeclaredTool(name="now")
    assert read(AGENTS).find("invented") == DeclaredTool(name="invented")


def test_a_custom_tool_is_a_function_with_one_text():
    [tool] = read(PATCH | {"format": {"type": "text"}}).options.tools
    assert tool.parameters["properties"] == {"input": {"type": "string"}}
    assert tool.strict is False


def test_a_lark_grammar_is_shown_to_the_model_and_a_regular_expression_is_enforced():
    [shown] = read(PATCH | {"format": LARK}).options.tools
    assert shown.description == ('Edits files.\n\nThe input follows this Lark grammar:\nstart: "x"')
    regex = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    [enforced] = read(PATCH | {"format": regex}).options.tools
    assert enforced.strict
    assert enforced.parameters["properties"]["input"]["pattern"] == "^(?:[a-z]+)$"


@pytest.mark.parametrize("definition", ["[0-9]{3}", "^[0-9]{3}$", "[0-9]{3}|x", "(?i)abc"])
def test_the_whole_input_of_a_custom_tool_matches_its_regular_expression(definition: str):
    regex = {"type": "grammar", "syntax": "regex", "definition": definition}
    [tool] = read(PATCH | {"format": regex}).options.tools
    schema = JsonSchema(text=json.dumps(tool.parameters))
    inputs = ("204", "x", "ABC", "2045", "a 204", "204 b", "useromm", "")
    accepted = {one for one in inputs if accepts(schema, json.dumps({"input": one}))}
    expected = re.compile(definition)
    assert accepted == {one for one in inputs if expected.fullmatch(one)}


def test_hosted_tools_are_omitted_with_a_notice_that_lists_each_once():
    found = read(
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation"},
        NOW,
        {"type": "web_search", "filters": {}},
    )
    assert names(found) == ["now"]
    assert found.notice == (
        "omitted tools that this server does not run: web_search, image_generation"
    )
    assert read(NOW).notice is None


def test_hosted_tools_alone_leave_no_tools():
    found = read({"type": "web_search"}, tool_choice="auto")
    assert found.options == ToolOptions()
    assert get_rejected_field({"type": "web_search"}, tool_choice="required") == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "now"}, "now"),
        ({"type": "function", "name": "now", "namespace": "agents"}, "agents__now"),
        ({"type": "custom", "name": "apply_patch"}, "agents__apply_patch"),
    ],
)
def test_a_choice_names_a_tool_as_the_client_declared_it(choice: Any, name: str):
    assert read(NOW, AGENTS, tool_choice=choice).options.choice == NamedToolChoice(name=name)


def test_allowed_tools_may_contain_hosted_tools_which_are_omitted():
    allowed = [{"type": "web_search"}, {"type": "function", "name": "now"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    found = read(NOW, PATCH, {"type": "web_search"}, tool_choice=choice)
    assert names(found) == ["now"]
    only = choice | {"mode": "required", "tools": allowed[:1]}
    assert get_rejected_field(NOW, tool_choice=only) == "tool_choice.tools"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "invented"}, "tools.0.type"),
        (AGENTS | {"name": "a b"}, "tools.0.name"),
        (AGENTS | {"tools": None}, "tools.0.tools"),
        (AGENTS | {"tools": [{"type": "web_search"}]}, "tools.0.tools.0.type"),
        (AGENTS | {"tools": [NOW, NOW]}, "tools.0.tools.1.name"),
        (PATCH | {"format": {"type": "grammar"}}, "tools.0.format.syntax"),
        (PATCH | {"format": LARK | {"syntax": "gbnf"}}, "tools.0.format.syntax"),
    ],
)
def test_a_malformed_tool_is_rejected_by_its_path(tool: Any, param: str):
    assert get_rejected_field(tool) == param


def test_a_choice_of_a_hosted_or_unknown_tool_is_rejected():
    assert get_rejected_field(NOW, tool_choice={"type": "web_search"}) == "tool_choice.type"
    unknown = {"type": "function", "name": "now", "namespace": "other"}
    assert get_rejected_field(NOW, tool_choice=unknown) == "tool_choice.name"


@pytest.mark.parametrize(
    "written", ['{"input": "useful 🙂 \\"text\\"\\n"}', '{ "input" :"a\\u00e9\\ud83d\\ude00b"}']
)
def test_the_input_of_a_call_that_ends_early_is_the_beginning_of_its_text(written: str):
    """Wherever the arguments end, no part of the JSON around the input is shown."""
    whole = json.loads(written)["input"]
    lengths = list[int]()
    for end in range(len(written) + 1):
        shown = read_custom_input(written[:end])
        assert whole.startswith(shown)
        lengths.append(len(shown))
    assert lengths == sorted(lengths)
    assert lengths[-1] == len(whole)


@pytest.mark.parametrize("written", ["free text", '{"other": "x"', '{"input": 1}', "[1]"])
def test_arguments_of_another_form_are_the_input(written: str):
    assert read_custom_input(written) == written


def test_a_deferred_tool_is_in_the_prompt():
    assert names(read(NOW | {"defer_loading": True})) == ["now"]
    assert names(read(AGENTS | {"tools": [NOW | {"defer_loading": True}]})) == ["agents__now"]
