"""Apertus' calls: a JSON array in which each name is the key of its arguments, within thoughts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.apertus import Family
from tests.text.families.reading import (
    calls,
    check_prose,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
    reasoning,
)
from tests.text.families.rows import law, llamacpp, roundtrip
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = Family()
TAGS = ReasoningTags(open="<|inner_prefix|>", close="<|inner_suffix|>")
TEMPLATE = "Apertus-8B-Instruct.jinja"
MARKERS = ("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>")


def test_what_its_models_wrote_is_read(shared):
    for row in law((*roundtrip(shared, TEMPLATE), *llamacpp(shared, TEMPLATE)), {}):
        check_row(FAMILY, row)


def test_it_calls_while_it_thinks_and_goes_on_thinking():
    text = (
        '<|inner_prefix|>a <|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|> b'
        "<|tools_prefix|>?<|inner_suffix|>c"
    )
    pieces = check_text(FAMILY, text, tools=[WEATHER], tags=TAGS)
    assert [(call.name, call.arguments) for call in calls(pieces)] == [("f", '{"x": 1}')]
    assert reasoning(pieces) == "ab<|tools_prefix|>?"
    assert content(pieces) == "c"


def test_without_reasoning_calls_are_read_too():
    text = 'a<|tools_prefix|>[{"f": {}}]<|tools_suffix|>'
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    assert [call.name for call in calls(pieces)] == ["f"]
    assert content(pieces) == "a"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('[{"f": {"x": oh}}]<|tools_suffix|>', '{"x": oh}}]'),
        ('[{"f": {"x": 1}, "g": 2}]<|tools_suffix|>', '{"x": 1}, "g": 2}]'),
    ],
)
def test_what_is_wrong_with_arguments_stands_in_them(text, arguments):
    found = calls(check_text(FAMILY, f"<|tools_prefix|>{text}", tools=[WEATHER]))
    assert [call.arguments for call in found] == [arguments]


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_any_text_is_read_the_same_however_it_is_cut(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_template_writes(shared):
    check_spelling(FAMILY, roundtrip(shared, TEMPLATE), begin="<|tools_prefix|>")
