"""Functionary 3.1's calls: JSON in a tag that is named after the function."""

import pytest
from hypothesis import given

from app.text.families.functionary_v31 import Family
from tests.text.families.reading import (
    calls,
    check_prose,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
)
from tests.text.families.rows import law, llamacpp, roundtrip
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = Family()
TEMPLATE = "meetkai-functionary-medium-v3.1.jinja"
MARKERS = ("<function=", "</function>", "<|python_tag|>")


def test_what_its_models_wrote_is_read(shared):
    for row in law((*roundtrip(shared, TEMPLATE), *llamacpp(shared, TEMPLATE)), {}):
        check_row(FAMILY, row)


def test_arguments_behind_the_python_token_are_those_of_a_function_called_python():
    pieces = check_text(FAMILY, '<|python_tag|>{"code": "1"} done', tools=[WEATHER])
    assert [(call.name, call.arguments) for call in calls(pieces)] == [("python", '{"code": "1"}')]
    assert content(pieces) == "done"


@pytest.mark.parametrize("text", ["<function=", "<function=>{}", "<|python_tag|>print(1)"])
def test_what_cannot_be_a_call_stays_text(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_a_marker_within_a_string_ends_nothing():
    found = calls(
        check_text(FAMILY, '<function=f>{"a": "</function>"}</function>', tools=[WEATHER])
    )
    assert [call.arguments for call in found] == ['{"a": "</function>"}']


@given(mixtures(*MARKERS, "<function=get_weather>"))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_template_writes(shared):
    check_spelling(FAMILY, roundtrip(shared, TEMPLATE), begin="<function=")
