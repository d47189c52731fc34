"""Apertus' calls: a JSON array, each name the key of its arguments, also within reasoning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.apertus import Family
from tests.text.families.reading import (
    check_prose,
    check_row,
    check_text,
    collect_calls,
    join_content,
    join_reasoning,
    mixtures,
    prose,
)
from tests.text.families.rows import llamacpp, roundtrip, select_rows
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = Family()
TAGS = ReasoningTags(open="<|inner_prefix|>", close="<|inner_suffix|>")
TEMPLATE = "Apertus-8B-Instruct.jinja"
MARKERS = ("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>")


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows((*roundtrip(shared, TEMPLATE), *llamacpp(shared, TEMPLATE)), {}):
        check_row(FAMILY, row)


def test_calls_may_come_within_reasoning():
    text = (
        '<|inner_prefix|>a <|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|> b'
        "<|tools_prefix|>?<|inner_suffix|>c"
    )
    pieces = check_text(FAMILY, text, tools=[WEATHER], tags=TAGS)
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [("f", '{"x": 1}')]
    assert join_reasoning(pieces) == "ab?"
    assert join_content(pieces) == "c"


def test_calls_are_parsed_without_reasoning():
    text = 'a<|tools_prefix|>[{"f": {}}]<|tools_suffix|>'
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    assert [call.name for call in collect_calls(pieces)] == ["f"]
    assert join_content(pieces) == "a"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('[{"f": {"x": oh}}]<|tools_suffix|>', '{"x": oh}'),
        ('[{"f": {"x": 1}, "g": 2}]<|tools_suffix|>', '{"x": 1}, "g": 2}]'),
    ],
)
def test_invalid_arguments_are_passed_through(text, arguments):
    found = collect_calls(check_text(FAMILY, f"<|tools_prefix|>{text}", tools=[WEATHER]))
    assert [call.arguments for call in found] == [arguments]


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_parsing_does_not_depend_on_chunk_boundaries(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output(shared):
    check_spelling(FAMILY, roundtrip(shared, TEMPLATE), begin="<|tools_prefix|>")
