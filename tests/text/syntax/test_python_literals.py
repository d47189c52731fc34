"""Conversion of Python literals, also sloppy ones, to JSON."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.syntax.nested_values import parse_nested_value
from app.text.syntax.python_literals import PYTHON_NOTATION
from app.text.syntax.reader import Reader
from tests.rows import rows


def convert(text):
    """The JSON of the literal at the start of a text, whether it is complete, and the rest of the
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
