"""Granite's calls: a JSON array behind a token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.granite import Family
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
from tests.text.families.rows import law, llamacpp, templates
from tests.text.families.walking import TOOLS, WEATHER, Walk, check_walks

FAMILY = Family()
TAGS = ReasoningTags(open="<think>", close="</think>")
TEMPLATE = "ibm-granite-granite-3.3-2B-Instruct.jinja"
MARKERS = ("<|tool_call|>", "<tool_call>", "<think>", "</think>", "<response>", "</response>")
CALL = '[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'


def test_what_its_models_wrote_is_read(shared):
    for row in law(llamacpp(shared, TEMPLATE), {}):
        check_row(FAMILY, row)


def test_its_templates_are_claimed_the_one_without_reasoning_too(shared):
    first = templates(shared)["llamacpp-ibm-granite_granite-3.0-8b-instruct.jinja"]
    assert FAMILY.matches(first)
    assert FAMILY.reasoning_tags(first) is None


@pytest.mark.parametrize("mark", ["<|tool_call|>", "<tool_call>"])
def test_calls_stand_behind_the_token_or_its_letters(mark):
    pieces = check_text(FAMILY, f"Let me see.\n{mark} {CALL}\n", tools=[WEATHER])
    assert [(call.name, call.arguments) for call in calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}')
    ]
    assert content(pieces) == "Let me see."


def test_an_answer_behind_reasoning_is_taken_out_of_its_tags():
    text = "<think>a</think>\n<response>b</response>"
    pieces = check_text(FAMILY, text, tools=[], tags=TAGS)
    assert (reasoning(pieces), content(pieces)) == ("a", "b")


def test_the_same_tags_in_an_answer_without_reasoning_are_text():
    check_prose(FAMILY, "<response>b</response>", tools=[], tags=TAGS)


@pytest.mark.parametrize("text", ["<|tool_call|>", "<|tool_call|>{}", "<|tool_call|>[]"])
def test_what_has_no_name_stays_text(text):
    check_prose(FAMILY, text, tools=[WEATHER])


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_any_text_is_read_the_same_however_it_is_cut(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_template_asks_for():
    assert Walk(FAMILY, [WEATHER]).accepts(f"<|tool_call|>{CALL}")
