"""Functionary 3.2's answers: parts for everybody and for functions."""

import pytest
from hypothesis import given

from app.text.families.functionary_v32 import Family
from tests.text.families.reading import (
    calls,
    check_prose,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
)
from tests.text.families.rows import law, llamacpp
from tests.text.families.walking import NOW, TOOLS, WEATHER, Walk, check_walks

FAMILY = Family()
TEMPLATE = "meetkai-functionary-medium-v3.2.jinja"
MARKERS = (">>>", "all\n", "get_weather\n", ">>>all\n", ">>>get_weather\n")


def test_what_its_models_wrote_is_read(shared):
    for row in law(llamacpp(shared, TEMPLATE), {}):
        check_row(FAMILY, row)


def test_parts_follow_each_other():
    text = 'all\nLet me see.>>>get_weather\n{"city": "Oslo"}\n>>>now\n{}>>>all\nDone.'
    pieces = check_text(FAMILY, text, tools=[WEATHER, NOW])
    assert content(pieces) == "Let me see.Done."
    assert [(call.name, call.arguments) for call in calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]


def test_an_example_for_a_console_is_no_part():
    text = "all\nTry this:\n>>> now\n>>> import this\n>>>nobody\n"
    pieces = check_text(FAMILY, text, tools=[NOW])
    assert content(pieces) == text.removeprefix("all\n")


def test_what_is_wrong_with_arguments_stands_in_them():
    found = calls(check_text(FAMILY, 'now\n{"a": oh >>> no}>>>all\n', tools=[NOW]))
    assert [call.arguments for call in found] == ['{"a": oh >>> no}']


def test_without_tools_only_everybody_is_spoken_to():
    pieces = check_text(FAMILY, "all\nHello>>>get_weather\n{}", tools=[])
    assert content(pieces) == "Hello>>>get_weather\n{}"


@pytest.mark.parametrize("text", ["Hello", "all", "get_weather {}", "\nall\n"])
def test_an_answer_without_a_recipient_is_text(text):
    check_prose(FAMILY, text, tools=[WEATHER])


@given(mixtures(*MARKERS))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=("all\n", "get_weather\n"))


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_template_writes():
    text = 'get_weather\n{"city": "Oslo"}>>>now\n{}'
    assert Walk(FAMILY, [WEATHER, NOW]).accepts(text)
