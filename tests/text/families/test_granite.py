"""Granite's calls: a JSON array after a token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.json_calls import FAMILIES
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
from tests.text.families.rows import llamacpp, select_rows, templates
from tests.text.families.walking import TOOLS, WEATHER, Walk, check_walks

FAMILY = FAMILIES["granite"]
TAGS = ReasoningTags(open="<think>", close="</think>")
TEMPLATE = "ibm-granite-granite-3.3-2B-Instruct.jinja"
MARKERS = ("<|tool_call|>", "<tool_call>", "<think>", "</think>", "<response>", "</response>")
CALL = '[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows(llamacpp(shared, TEMPLATE), {}):
        check_row(FAMILY, row)


def test_the_family_claims_templates_with_and_without_reasoning(shared):
    first = templates(shared)["llamacpp-ibm-granite_granite-3.0-8b-instruct.jinja"]
    assert FAMILY.matches(first)
    assert FAMILY.reasoning_tags(first) is None


@pytest.mark.parametrize("mark", ["<|tool_call|>", "<tool_call>"])
def test_calls_follow_the_token_or_its_text(mark):
    pieces = check_text(FAMILY, f"Let me see.\n{mark} {CALL}\n", tools=[WEATHER])
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}')
    ]
    assert join_content(pieces) == "Let me see."


def test_response_tags_after_reasoning_are_removed():
    text = "<think>a</think>\n<response>b</response>"
    pieces = check_text(FAMILY, text, tools=[], tags=TAGS)
    assert (join_reasoning(pieces), join_content(pieces)) == ("a", "b")


def test_response_tags_without_reasoning_are_text():
    check_prose(FAMILY, "<response>b</response>", tools=[], tags=TAGS)


@pytest.mark.parametrize("text", ["<|tool_call|>", "<|tool_call|>{}", "<|tool_call|>[]"])
def test_a_call_without_a_name_is_text(text):
    check_prose(FAMILY, text, tools=[WEATHER])


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_parsing_does_not_depend_on_chunk_boundaries(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_the_syntax_of_the_template():
    assert Walk(FAMILY, [WEATHER]).accepts(f"<|tool_call|>{CALL}")
