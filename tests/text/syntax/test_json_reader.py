"""JSON from a model, passed on while it is streamed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.syntax.json_reader import (
    ValueEnd,
    decode_json_string,
    parse_json_string,
    parse_json_value,
)
from tests.rows import rows
from tests.text.families.reading import split_at
from tests.text.syntax.test_reader import run

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def parse_value(*chunks: str) -> tuple[ValueEnd, str, str]:
    """The end of the value, the output, and the rest of the text."""
    output: list[str] = []
    end, rest = run(
        chunks, lambda reader: parse_json_value(reader, lambda text, _: output.append(text))
    )
    return end, "".join(output), rest


def _is_json(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(value=values, indent=st.sampled_from([None, 1]), ascii=st.booleans(), data=st.data())
def test_a_value_is_passed_on_verbatim(value, indent, ascii, data):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    positions = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    assert parse_value(*split_at(text, positions)) == ("complete", text, "")
    assert parse_value(f" \n{text}", "]x") == ("complete", text, "]x")


@given(value=values, data=st.data())
def test_a_truncated_value_is_passed_on(value, data):
    text = json.dumps([value])
    prefix = text[: data.draw(st.integers(0, len(text) - 1))]
    assert parse_value(*prefix) == ("cut", prefix, "")


@given(st.lists(st.sampled_from([*'{}[],:"\\ -+.01eEtu', "true", "null", '"a"', "\\u00e9"])))
def test_whole_values_are_json_and_broken_ones_are_not(parts):
    text = "".join(parts)
    end, output, rest = parse_value(text)
    if end == "complete":
        assert _is_json(output)
        assert _without_repaired(output + rest) == _without_repaired(text.lstrip())
        return
    assert not _is_json(text)
    if end == "broken":
        # no JSON begins with this text: the next character is invalid
        assert _without_repaired(output + rest) == _without_repaired(text.lstrip())
        assert parse_value(output)[0] == "cut"
    else:
        assert _without_repaired(output) == _without_repaired(text.lstrip())
        assert rest == ""


def _without_repaired(text: str) -> str:
    return text.replace("\\", "").replace(",", "")


@rows(
    ("text", "end", "rest"),
    [
        ("{'a': 1}", "broken", "'a': 1}"),
        ("[,]", "broken", ",]"),
        ('{"a" 1}', "broken", "1}"),
        ("[01]", "broken", "]"),  # an invalid number is detected at its end
        ("01", "cut", ""),
        ("tru!", "broken", "!"),
        ("NaN", "broken", "NaN"),
        ("-", "cut", ""),
        ("1.", "cut", ""),
        ("12", "complete", ""),
        ("12 ", "complete", " "),
        ("", "cut", ""),
    ],
)
def test_a_value_ends_where_it_cannot_continue(text, end, rest):
    result = parse_value(text)
    assert (result[0], result[2]) == (end, rest)
    assert parse_value(*text)[::2] == (end, rest)


def test_control_characters_within_strings_are_escaped():
    end, output, _ = parse_value('{"a\n": "\t\x01"}')
    assert end == "complete"
    assert output == '{"a\\n": "\\t\\u0001"}'
    assert json.loads(output) == {"a\n": "\t\x01"}


@rows(
    ("text", "expected"),
    [
        ('{"a": "\\d+"}', '{"a": "\\\\d+"}'),
        ('"C:\\users\\u00e9"', '"C:\\\\users\\u00e9"'),
        ('"\\u12"', '"\\\\u12"'),
        ('"\\\n"', '"\\\\\\n"'),
        ("[1, 2 , ]", "[1, 2  ]"),
        ('{"a": [1,],}', '{"a": [1]}'),
        ("[1 ,\n2]", "[1 ,\n2]"),
    ],
)
def test_usual_errors_of_models_are_repaired(text, expected):
    assert parse_value(text) == parse_value(*text) == ("complete", expected, "")


def test_a_truncated_value_is_output_unchanged():
    for text in ("[1, ", '"a\\', '"a\\u1'):
        assert parse_value(text) == parse_value(*text) == ("cut", text, "")


@given(st.text(), st.booleans())
def test_a_string_is_decoded(text, ascii):
    encoded = json.dumps(text, ensure_ascii=ascii)
    assert run([f" {encoded}!"], parse_json_string) == (text, "!")


@pytest.mark.parametrize("text", ["", "1", "'a'", '"a', '"\\ud800"'])
def test_an_invalid_string_is_none(text):
    assert run([text], parse_json_string)[0] is None


def test_an_unpaired_surrogate_is_none():
    assert decode_json_string('"\\ud83d\\ude42"') == "🙂"
    assert decode_json_string('"\\ud83d"') is None
