"""Conversion of Python literals to JSON."""

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
    # tokenizers never produce surrogates
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab'\"\\\n\x7f😀é"), inner),
    max_leaves=8,
)


def stream_literal(text: str, *marks: str) -> tuple[str, str, str | None]:
    """The output, the rest and the mark of text that is streamed by character."""
    reader, pieces, mark = Reader(), list[str](), None

    def parse():
        nonlocal mark
        mark = yield from convert_literal_before(reader, *marks, on_text=pieces.append)

    parser = parse()
    rest = ""
    for character in text:
        reader.push(character)
        if next(parser, "over") == "over":
            break
    reader.end()
    next(parser, None)
    rest = text[reader.at :]
    return "".join(pieces), rest, mark


@given(VALUES)
def test_python_literals_become_json_of_the_same_value(value):
    assert json.loads(convert_literal(repr(value))) == value == ast.literal_eval(repr(value))


@given(VALUES)
def test_json_is_unchanged(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert convert_literal(text) == text


@given(VALUES)
def test_streaming_gives_the_same_result(value):
    assert stream_literal(repr(value) + "</p>", "</p>") == (
        convert_literal(repr(value)),
        "</p>",
        "</p>",
    )


def test_a_mark_within_a_string_is_ignored():
    text = """{'a': "</p>", "b": '</p>'}"""
    assert stream_literal(f"{text}</p>rest", "</p>") == (
        '{"a": "</p>", "b": "</p>"}',
        "</p>rest",
        "</p>",
    )


def test_unknown_escapes_are_kept():
    assert json.loads(convert_literal(r'["\d", "\'", "\x4", "\U0001F60"]')) == [
        r"\d",
        "'",
        r"\x4",
        r"\U0001F60",
    ]


def test_line_ends_in_strings_are_escaped():
    assert json.loads(convert_literal("['a\nb\t']")) == ["a\nb\t"]


def test_a_truncated_value_is_passed_on():
    assert stream_literal("{'a': 'it\\'s", "</p>") == ('{"a": "it\'s', "", None)


def test_text_is_escaped_as_in_json():
    assert f'"{escape_json(chr(34))}"' == json.dumps('"')
