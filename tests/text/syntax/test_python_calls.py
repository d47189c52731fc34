"""Calls in Python syntax."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.requests import Tool
from app.text.family import ChatFamily
from app.text.syntax.python_calls import build_python_grammar, parse_python_calls, parse_python_list
from tests.rows import rows
from tests.text.families.reading import check_text, collect_calls, join_content
from tests.text.families.walking import Walk, arguments_of, check_walks, spell


class Lists(ChatFamily):
    """Parses a list of calls; all other text is content."""

    parse = staticmethod(parse_python_list)

    def parse_tool_calls(self, reader, output, tools):
        start = reader.hold()
        outcome = yield from self.parse(reader, output)
        if outcome == "none":
            reader.rewind(start)
        on_text = (
            output.add_content
            if outcome != "broken"
            else lambda text, _: output.add_arguments(text)
        )
        yield from reader.read_until(on_text=on_text)

    def build_tool_call_grammar(self, tools, literal, json_schema):
        return build_python_grammar(
            tools, literal, json_schema, before="[", between=", ", after="]", trigger="["
        )


class Lines(Lists):
    parse = staticmethod(parse_python_calls)


def read(text, family=None):
    pieces = check_text(family or Lists(), text, tools=())
    return [(call.name, call.arguments) for call in collect_calls(pieces)], join_content(pieces)


@given(st.text("fg(),='\"[]{}:\\ \n1aTrue", max_size=30))
def test_any_text_can_be_parsed(text):
    read(f"[f({text}")


@rows(
    ("text", "found", "rest"),
    [
        ("[f(), g(a=1)]", [("f", "{}"), ("g", '{"a": 1}')], ""),
        ("[ f( ) , ] so", [("f", "{}")], ", ] so"),
        ("[f(a=1) so", [("f", '{"a": 1}')], "so"),
        ("[f(a=1), g]", [("f", '{"a": 1}')], ", g]"),
        ("[f]", [], "[f]"),
        ("[]", [], "[]"),
        ("f()", [], "f()"),
        ("[f(a=b)]", [("f", '{"a": b)]')], ""),
        ("[f(1)]", [("f", "{1)]")], ""),
        ("[f(a=1 b=2)]", [("f", '{"a": 1b=2)]')], ""),
        ("[f(a={'b': c})]", [("f", '{"a": {"b": c})]')], ""),
        ("[f(a='b", [("f", '{"a": "b')], ""),
        ("[f(a=", [("f", '{"a": ')], ""),
        ("[f(a=" + "[" * 80, [("f", '{"a": ' + "[" * 80)], ""),
    ],
)
def test_invalid_calls_are_text_and_invalid_arguments_are_passed_through(text, found, rest):
    assert read(text) == (found, rest)


def test_calls_may_be_on_lines_of_their_own():
    assert read("f(a=1)\ng()\n\nh(b=2), i() so", Lines()) == (
        [("f", '{"a": 1}'), ("g", "{}"), ("h", '{"b": 2}'), ("i", "{}")],
        "so",
    )


def test_only_functions_with_given_names_are_called():
    class Named(Lists):
        def parse(self, reader, output):
            return parse_python_list(reader, output, names={"f"})

    assert read("[f(), g()]", Named()) == ([("f", "{}")], ", g()]")
    assert read("[g()]", Named()) == ([], "[g()]")


def tool(**parameters):
    return Tool(name="f", description=None, parameters={"type": "object", **parameters})


def test_the_grammar_enforces_the_schema_of_each_parameter():
    tree = {"type": "object", "properties": {"part": {"$ref": "#/$defs/tree"}}}
    properties = {
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "kind": {"enum": ["a", 1, None]},
        "tree": {"$ref": "#/$defs/tree"},
        "any": True,
    }
    definitions = {"tree": {**tree, "additionalProperties": False}}
    required = ["code", "kind", "tree"]
    strict_tool = tool(**{"properties": properties, "required": required, "$defs": definitions})
    check_walks(Lists(), [strict_tool])


def test_each_optional_parameter_may_be_left_out():
    walk = Walk(Lists(), [tool(properties={name: {"type": "boolean"} for name in "abc"})])
    for inside in ("", "a=true", "b=true", "c=true", "a=true, c=false", "a=true, b=true, c=true"):
        assert walk.accepts(f"[f({inside})]"), inside
    for inside in ("b=true, a=true", "a=true, ", ", a=true", "a=true b=true"):
        assert not walk.accepts(f"[f({inside})]"), inside


@pytest.mark.parametrize(
    "parameters",
    [
        {"anyOf": [{"required": ["a"]}]},
        {"required": ["a"]},
        {"properties": {"a b": {}}},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}},
        {"properties": {"a": {"properties": {"b": {"$id": "x"}}}}},
        {"properties": [], "required": 3},
    ],
)
def test_unsupported_schemas_are_left_to_json(parameters):
    assert Lists().build_tool_call_grammar([tool(**parameters)], spell, arguments_of) is None
