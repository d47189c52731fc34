"""Calls in Python syntax."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.requests import Tool
from app.text.family import ChatFamily
from app.text.syntax.nested_values import parse_nested_value
from app.text.syntax.python_calls import (
    PYTHON_NOTATION,
    build_python_grammar,
    parse_python_calls,
    parse_python_list,
)
from app.text.syntax.reader import Reader
from tests.rows import rows
from tests.text.families.reading import check_text, collect_calls, join_content
from tests.text.families.walking import Walk, arguments_of, check_walks, spell


def convert(text):
    """The JSON of the literal at the start of the text, whether it is complete, and the rest of the
    text, which is streamed by character."""
    reader, output = Reader(), []
    steps = parse_nested_value(PYTHON_NOTATION, reader, output.append)
    complete = None
    for character in [*text, None]:
        if character is None:
            reader.end()
        else:
            reader.push(character)
        if complete is None:
            try:
                next(steps)
            except StopIteration as stop:
                complete = stop.value
    return "".join(output), complete, reader.ahead


VALUES = {
    '"a"': "a",
    "'a'": "a",
    "'it\\'s'": "it's",
    '"""a "b"\nc"""': 'a "b"\nc',
    "r'\\d+'": "\\d+",
    r'"\n\t\x41\u00e9\U0001f642\/\q"': "\n\tAé🙂/\\q",
    r'"\ud83d\ude42"': "🙂",
    '"a\\\nb"': "ab",
    '"a\nb"': "a\nb",
    '"say "hi" now"': 'say "hi" now',
    '""': "",
    "True": True,
    "false": False,
    "None": None,
    "null": None,
    "3": 3,
    "-2.5": -2.5,
    "+7": 7,
    ".5": 0.5,
    "1.": 1.0,
    "1e3": 1e3,
    "1_000": 1000,
    "0xff": 255,
    "[]": [],
    "[1, 'a', [True,],]": [1, "a", [True]],
    "(1, 2)": [1, 2],
    "{}": {},
    "{'a': {'b': None}, \"c\": 1}": {"a": {"b": None}, "c": 1},
    "{1: 2, None: 3}": {"1": 2, "null": 3},
}


@rows(("literal", "value"), VALUES.items(), ids=VALUES)
def test_literals_have_their_python_value(literal, value):
    text, complete, rest = convert(f"{literal},")
    assert json.dumps(json.loads(text)) == json.dumps(value)
    assert (complete, rest) == (True, ",")


LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # an unpaired surrogate is not text
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab'\"\\\n"), inner),
    max_leaves=8,
)


@given(LITERALS)
def test_output_of_repr_is_parsed(value):
    text, complete, _ = convert(repr(value))
    assert complete
    assert json.loads(text) == ast.literal_eval(repr(value))


@given(LITERALS)
def test_json_is_parsed(value):
    text, complete, _ = convert(json.dumps(value))
    assert complete
    assert json.loads(text) == value


@rows("text", ["word", "1-2", "007", "1e", "nan", "f'a'", "--1", "0x", "1j", ""])
def test_an_invalid_value_is_not_consumed(text):
    assert convert(text) == ("", False, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("'ab", '"ab'), ("'a\\", '"a\\\\'), ("[1, 2", "[1, 2"), ("{'a': ", '{"a": '), ("{'a", "{")],
)
def test_a_truncated_value_is_passed_on(text, expected):
    assert convert(text)[:2] == (expected, False)


def test_strings_are_streamed():
    reader, output = Reader(), []
    steps = parse_nested_value(PYTHON_NOTATION, reader, output.append)
    for character in "'long text":
        reader.push(character)
        next(steps)
    assert "".join(output) == '"long text'


def test_the_depth_of_brackets_is_limited():
    assert convert("[" * 64 + "]" * 64)[1]
    assert not convert("[" * 65 + "]" * 65)[1]


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
