"""The arguments of calls as pieces of valid JSON."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.api.anthropic.tool_arguments import ArgumentsEncoder
from tests.rows import rows

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\}{,'), inner),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text('ab"\\}'), JSON, max_size=4)


def encode(text: str, *, cut: bool = False, size: int = 1) -> list[str]:
    encoder = ArgumentsEncoder()
    pieces = [encoder.feed(text[at : at + size]) for at in range(0, len(text), size)]
    return [piece for piece in (*pieces, encoder.flush(cut=cut)) if piece]


def read(text: str, *, cut: bool = False) -> Any:
    found = [json.loads("".join(encode(text, cut=cut, size=size))) for size in (1, 3, 999)]
    assert found[0] == found[1] == found[2]
    return found[0]


@given(OBJECTS, st.booleans(), st.integers(1, 9))
def test_an_object_is_unchanged_however_it_is_split(value: dict[str, Any], ascii: bool, size: int):
    text = json.dumps(value, ensure_ascii=ascii)
    pieces = encode(text, size=size)
    assert "".join(pieces) == text
    for end in range(1, len(pieces)):  # each piece ends a member
        json.loads("".join(pieces[:end]) + "}")


@given(OBJECTS, st.data())
def test_an_incomplete_call_keeps_its_complete_members(value: dict[str, Any], data: Any):
    text = json.dumps(value)
    cut = data.draw(st.integers(0, len(text) - 1))
    found = read(text[:cut], cut=True)
    assert list(found.items()) == list(value.items())[: len(found)]


@given(st.text('{}[]",:\\ a1', max_size=30), st.booleans())
def test_any_text_becomes_an_object(text: str, cut: bool):
    assert isinstance(read(text, cut=cut), dict)


@rows(
    ("text", "expected"),
    [
        ("", {}),
        (" ", {}),
        ("{}", {}),
        ('{"a": 1} and text', {"a": 1}),
        ('{"a": 1}}', {"a": 1}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": 1, "b": oops', {"a": 1, "invalid_arguments": ' "b": oops'}),
        ('{"a": 1, b, c', {"a": 1, "invalid_arguments": " b, c"}),
        ("oops", {"invalid_arguments": "oops"}),
        ("[1]", {"invalid_arguments": "[1]"}),
        ('{"a": 1]', {"invalid_arguments": '"a": 1]'}),
        ('{"a": "\\ud800"}', {"invalid_arguments": '"a": "\\ud800"}'}),
    ],
)
def test_invalid_arguments_are_repaired(text: str, expected: Any):
    """Anthropic's TypeScript SDK crashed on text after the object, and both on text that is not the
    beginning of one."""
    assert read(text) == expected


def test_members_are_sent_as_soon_as_they_are_complete():
    assert encode('{"a": 1, "b": [2, 3], "c": "x"}') == ['{"a": 1', ', "b": [2, 3]', ', "c": "x"}']
