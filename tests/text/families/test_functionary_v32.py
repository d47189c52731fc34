"""Functionary 3.2's answers: parts for all recipients and for functions."""

import pytest
from hypothesis import given

from app.text.family import load_families
from tests.text.families.reading import (
    check_prose,
    check_row,
    check_text,
    collect_calls,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.rows import llamacpp, select_rows
from tests.text.families.walking import NOW, TOOLS, WEATHER, Walk, check_walks

FAMILY = load_families()["functionary_v32"]
TEMPLATE = "meetkai-functionary-medium-v3.2.jinja"
MARKERS = (">>>", "all\n", "get_weather\n", ">>>all\n", ">>>get_weather\n")


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows(llamacpp(shared, TEMPLATE), {}):
        check_row(FAMILY, row)


def test_consecutive_parts_are_parsed():
    text = 'all\nLet me see.>>>get_weather\n{"city": "Oslo"}\n>>>now\n{}>>>all\nDone.'
    pieces = check_text(FAMILY, text, tools=[WEATHER, NOW])
    assert join_content(pieces) == "Let me see.Done."
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]


def test_a_python_console_example_begins_no_part():
    text = "all\nTry this:\n>>> now\n>>> import this\n>>>missing\n"
    pieces = check_text(FAMILY, text, tools=[NOW])
    assert join_content(pieces) == text.removeprefix("all\n")


def test_invalid_arguments_are_passed_through():
    found = collect_calls(check_text(FAMILY, 'now\n{"a": oh >>> no}>>>all\n', tools=[NOW]))
    assert [call.arguments for call in found] == ['{"a": oh >>> no}']


def test_without_tools_only_the_recipient_all_is_parsed():
    pieces = check_text(FAMILY, "all\nHello>>>get_weather\n{}", tools=[])
    assert join_content(pieces) == "Hello>>>get_weather\n{}"


@pytest.mark.parametrize("text", ["Hello", "all", "get_weather {}", "\nall\n"])
def test_an_answer_without_a_recipient_is_text(text):
    check_prose(FAMILY, text, tools=[WEATHER])


@given(mixtures(*MARKERS))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=("all\n", "get_weather\n"))


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output():
    text = 'get_weather\n{"city": "Oslo"}>>>now\n{}'
    assert Walk(FAMILY, [WEATHER, NOW]).accepts(text)
