"""Python's literals, loosely written, as JSON."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.syntax.nested_values import parse_nested_value
from app.text.syntax.python_literals import PYTHON_NOTATION
from app.text.syntax.reader import Reader


def converted(text):
    """The JSON that a text begins with, and what is left of it; read a character at a time."""
    reader, written = Reader(), []
    steps = parse_nested_value(PYTHON_NOTATION, reader, written.append)
    whole = None
    for character in [*text, None]:
        if character is None:
            reader.end()
        else:
            reader.push(character)
        if whole is None:
            try:
                next(steps)
            except StopIteration as stop:
                whole = stop.value
    return "".join(written), whole, reader.ahead


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


@pytest.mark.parametrize(("written", "value"), VALUES.items(), ids=VALUES)
def test_a_value_is_what_python_takes_it_for(written, value):
    text, whole, rest = converted(f"{written},")
    assert json.dumps(json.loads(text)) == json.dumps(value)
    assert (whole, rest) == (True, ",")


LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # half of a pair is no text
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab'\"\\\n"), inner),
    max_leaves=8,
)


@given(LITERALS)
def test_whatever_python_prints_is_read(value):
    text, whole, _ = converted(repr(value))
    assert whole
    assert json.loads(text) == ast.literal_eval(repr(value))


@given(LITERALS)
def test_whatever_json_prints_is_read(value):
    text, whole, _ = converted(json.dumps(value))
    assert whole
    assert json.loads(text) == value


@pytest.mark.parametrize("text", ["word", "1-2", "007", "1e", "nan", "f'a'", "--1", "0x", "1j", ""])
def test_what_is_no_value_is_not_taken(text):
    assert converted(text) == ("", False, text)


@pytest.mark.parametrize(
    ("text", "written"),
    [("'ab", '"ab'), ("'a\\", '"a\\\\'), ("[1, 2", "[1, 2"), ("{'a': ", '{"a": '), ("{'a", "{")],
)
def test_what_is_cut_is_handed_on_as_far_as_it_goes(text, written):
    assert converted(text)[:2] == (written, False)


def test_a_string_is_handed_on_before_its_end_is_known():
    reader, written = Reader(), []
    steps = parse_nested_value(PYTHON_NOTATION, reader, written.append)
    for character in "'long text":
        reader.push(character)
        next(steps)
    assert "".join(written) == '"long text'


def test_brackets_go_no_deeper_than_can_be_meant():
    assert converted("[" * 64 + "]" * 64)[1]
    assert not converted("[" * 65 + "]" * 65)[1]
