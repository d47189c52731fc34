"""Functionary 3.1's calls: JSON in a tag that is named after the function."""

import pytest
from hypothesis import given

from app.text.families.functionary import FAMILIES
from tests.text.families.reading import (
    check_prose,
    check_row,
    check_text,
    collect_calls,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.rows import llamacpp, roundtrip, select_rows
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = FAMILIES["functionary_v31"]
TEMPLATE = "meetkai-functionary-medium-v3.1.jinja"
MARKERS = ("<function=", "</function>", "<|python_tag|>")


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows((*roundtrip(shared, TEMPLATE), *llamacpp(shared, TEMPLATE)), {}):
        check_row(FAMILY, row)


def test_arguments_after_the_python_token_belong_to_a_function_named_python():
    pieces = check_text(FAMILY, '<|python_tag|>{"code": "1"} done', tools=[WEATHER])
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
        ("python", '{"code": "1"}')
    ]
    assert join_content(pieces) == "done"


@pytest.mark.parametrize("text", ["<function=", "<function=>{}", "<|python_tag|>print(1)"])
def test_an_invalid_call_is_text(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_a_marker_within_a_string_does_not_end_the_call():
    found = collect_calls(
        check_text(FAMILY, '<function=f>{"a": "</function>"}</function>', tools=[WEATHER])
    )
    assert [call.arguments for call in found] == ['{"a": "</function>"}']


@given(mixtures(*MARKERS, "<function=get_weather>"))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output(shared):
    check_spelling(FAMILY, roundtrip(shared, TEMPLATE), begin="<function=")
