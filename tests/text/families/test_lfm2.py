"""LFM2 and LFM2.5."""

from dataclasses import replace

import pytest
from hypothesis import given

from app.text.families.lfm2 import Family
from tests.text.families.reading import (
    calls,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
)
from tests.text.families.rows import ANY, law, llamacpp, mlx_lm, ollama, template
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, check_walks

FAMILY = Family()
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("")

LEFT_OUT = {
    "llamacpp-3688-155": "escapes in strings are not decoded there; Python's are",
    "ollama-lfm2-176": "white space at the beginning of an answer is dropped there",
}

CALL = '<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>'


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    rows = [
        *llamacpp(shared, "LFM2-8B-A1B.jinja", "LFM2.5-Instruct.jinja"),
        *ollama(shared, "lfm2", name="LFM2.5-Instruct.jinja"),
        *mlx_lm(shared, "pythonic"),
    ]
    for row in law(rows, LEFT_OUT):
        # ollama reads calls of tools that nobody offered
        check_row(FAMILY, replace(row, tools=row.tools or (ANY,), in_reasoning=False))


@given(mixtures(*FAMILY.markers, CALL, "[now(", "now", "get_weather(city=", "'", ")]", "="))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*FAMILY.markers, "["))
    check_text(FAMILY, text, tools=(), tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


@pytest.mark.parametrize("text", ["[1, 2]", "[a link](x)", "[other(a=1)]", "[now]", "[", "a[b("])
def test_brackets_in_prose_are_prose(text):
    assert content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALL, tools=())) == CALL


def test_strings_are_read_that_the_template_did_not_escape(shared):
    source = template(shared, "hfjinja-LiquidAI_LFM2.5-VL-450M.jinja")
    assert FAMILY.matches(source)
    text = CALL.replace("Oslo", 'a "quoted"\nC:\\path')
    assert [call.arguments for call in calls(check_text(FAMILY, text, tools=TOOLS))] == [
        r'{"city": "a \"quoted\"\nC:\\path"}'
    ]


def test_a_json_list_is_read_between_the_tags():
    text = '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>'
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [(call.name, call.arguments) for call in calls(pieces)] == [("now", "{}")]


def test_what_is_no_call_stays_text():
    text = "<|tool_call_start|>get_weather<|tool_call_end|>"
    assert content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_arguments_that_are_broken_are_handed_on_as_they_are():
    text = CALL.replace('"Oslo"', "Oslo") + "Done."
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in calls(pieces)] == ['{"city": Oslo)]']
    assert content(pieces) == "Done."


def test_a_marker_within_an_argument_does_not_end_the_call():
    pieces = check_text(FAMILY, CALL.replace("Oslo", "<|tool_call_end|>"), tools=TOOLS)
    assert [call.arguments for call in calls(pieces)] == ['{"city": "<|tool_call_end|>"}']


def test_what_its_grammar_produces_are_calls_that_satisfy_their_schemas():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))
