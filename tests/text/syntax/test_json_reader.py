"""JSON as a model writes it, handed on while it is still being written."""

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
from tests.text.families.reading import cut
from tests.text.syntax.test_reader import run

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def scanned(*chunks: str) -> tuple[ValueEnd, str, str]:
    """How the value ended, what was handed on, and what was left."""
    handed: list[str] = []
    end, rest = run(
        chunks, lambda reader: parse_json_value(reader, lambda text, _: handed.append(text))
    )
    return end, "".join(handed), rest


def _is_json(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(value=values, indent=st.sampled_from([None, 1]), ascii=st.booleans(), data=st.data())
def test_a_value_is_handed_on_as_it_is_written(value, indent, ascii, data):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    assert scanned(*cut(text, places)) == ("whole", text, "")
    assert scanned(f" \n{text}", "]x") == ("whole", text, "]x")


@given(value=values, data=st.data())
def test_a_value_that_is_cut_is_handed_on_as_far_as_it_goes(value, data):
    text = json.dumps([value])
    head = text[: data.draw(st.integers(0, len(text) - 1))]
    assert scanned(*head) == ("cut", head, "")


@given(st.lists(st.sampled_from([*'{}[],:"\\ -+.01eEtu', "true", "null", '"a"', "\\u00e9"])))
def test_what_it_calls_whole_is_json_and_what_it_calls_broken_is_none(parts):
    text = "".join(parts)
    end, handed, rest = scanned(text)
    if end == "whole":
        assert _is_json(handed)
        assert handed + rest == text.lstrip()
        return
    assert not _is_json(text)
    if end == "broken":
        # nothing that begins so is JSON: no character can stand where it stopped
        assert handed + rest == text.lstrip()
        assert scanned(handed)[0] == "cut"
    else:
        assert (handed, rest) == (text.lstrip(), "")


@pytest.mark.parametrize(
    ("text", "end", "rest"),
    [
        ("{'a': 1}", "broken", "'a': 1}"),
        ("[1,]", "broken", "]"),
        ('{"a" 1}', "broken", "1}"),
        ("[01]", "broken", "]"),  # what is no number is seen to be none where it ends
        ("01", "cut", ""),
        ("tru!", "broken", "!"),
        ('["\\x"]', "broken", 'x"]'),
        ("NaN", "broken", "NaN"),
        ("-", "cut", ""),
        ("1.", "cut", ""),
        ("12", "whole", ""),
        ("12 ", "whole", " "),
        ("", "cut", ""),
    ],
)
def test_a_value_ends_where_it_can_go_on_no_longer(text, end, rest):
    found = scanned(text)
    assert (found[0], found[2]) == (end, rest)
    assert scanned(*text)[::2] == (end, rest)


def test_control_characters_within_strings_are_escaped():
    end, handed, _ = scanned('{"a\n": "\t\x01"}')
    assert end == "whole"
    assert handed == '{"a\\n": "\\t\\u0001"}'
    assert json.loads(handed) == {"a\n": "\t\x01"}


@given(st.text(), st.booleans())
def test_a_string_is_decoded(text, ascii):
    written = json.dumps(text, ensure_ascii=ascii)
    assert run([f" {written}!"], parse_json_string) == (text, "!")


@pytest.mark.parametrize("text", ["", "1", "'a'", '"a', '"\\ud800"', '"\\x"'])
def test_what_is_no_whole_string_of_text_is_none(text):
    assert run([text], parse_json_string)[0] is None


def test_half_a_surrogate_pair_is_no_text():
    assert decode_json_string('"\\ud83d\\ude42"') == "🙂"
    assert decode_json_string('"\\ud83d"') is None
