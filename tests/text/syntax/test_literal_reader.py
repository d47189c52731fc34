"""JSON and Python's notation."""

import ast
import json

from hypothesis import given
from hypothesis import strategies as st

from app.text.syntax.literal_reader import convert_literal, convert_literal_before, escape_json
from app.text.syntax.reader import Reader

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # a surrogate is half a character, which no tokenizer spells
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab'\"\\\n\x7f😀é"), inner),
    max_leaves=8,
)


def streamed(text: str, *marks: str) -> tuple[str, str, str | None]:
    """What is handed on, what is left, and the mark, of a text that comes character by
    character."""
    reader, pieces, mark = Reader(), list[str](), None

    def parse():
        nonlocal mark
        mark = yield from convert_literal_before(reader, *marks, on_text=pieces.append)

    parser = parse()
    left = ""
    for character in text:
        reader.push(character)
        if next(parser, "over") == "over":
            break
    reader.end()
    next(parser, None)
    left = text[reader.at :]
    return "".join(pieces), left, mark


@given(VALUES)
def test_what_python_prints_is_json_of_the_same_value(value):
    assert json.loads(convert_literal(repr(value))) == value == ast.literal_eval(repr(value))


@given(VALUES)
def test_json_is_left_as_it_is(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert convert_literal(text) == text


@given(VALUES)
def test_it_comes_out_the_same_when_it_comes_piece_by_piece(value):
    assert streamed(repr(value) + "</p>", "</p>") == (convert_literal(repr(value)), "</p>", "</p>")


def test_a_mark_within_a_string_is_none():
    text = """{'a': "</p>", "b": '</p>'}"""
    assert streamed(f"{text}</p>rest", "</p>") == (
        '{"a": "</p>", "b": "</p>"}',
        "</p>rest",
        "</p>",
    )


def test_an_escape_that_escapes_nothing_stands_for_itself():
    assert json.loads(convert_literal(r'["\d", "\'", "\x4", "\U0001F60"]')) == [
        r"\d",
        "'",
        r"\x4",
        r"\U0001F60",
    ]


def test_line_ends_in_strings_are_escaped():
    assert json.loads(convert_literal("['a\nb\t']")) == ["a\nb\t"]


def test_what_is_cut_stays_open():
    assert streamed("{'a': 'it\\'s", "</p>") == ('{"a": "it\'s', "", None)


def test_a_text_is_quoted_as_json_has_it():
    assert f'"{escape_json(chr(34))}"' == json.dumps('"')
