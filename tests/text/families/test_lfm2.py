"""LFM2 and LFM2.5."""

from dataclasses import replace

import pytest
from hypothesis import given

from app.text.families.python_calls import FAMILIES
from tests.text.families.reading import (
    check_prose,
    check_row,
    check_text,
    collect_calls,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.rows import ANY, llamacpp, mlx_lm, ollama, select_rows, template
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, check_walks

FAMILY = FAMILIES["lfm2"]
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("")

EXCLUDED = {
    "llamacpp-3709-158": "llama.cpp keeps special tokens in reasoning",
    "llamacpp-3688-155": "llama.cpp does not decode escapes in strings; Python does",
    "ollama-lfm2-176": "ollama drops leading white space",
}

CALL = '<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>'


def test_real_model_outputs_are_parsed(shared):
    rows = [
        *llamacpp(shared, "LFM2-8B-A1B.jinja", "LFM2.5-Instruct.jinja"),
        *ollama(shared, "lfm2", name="LFM2.5-Instruct.jinja"),
        *mlx_lm(shared, "pythonic"),
    ]
    for row in select_rows(rows, EXCLUDED):
        # ollama also parses calls to unknown tools
        check_row(FAMILY, replace(row, tools=row.tools or (ANY,), in_reasoning=False))


@given(mixtures(*FAMILY.markers, CALL, "[now(", "now", "get_weather(city=", "'", ")]", "="))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*FAMILY.markers, "["))
    check_text(FAMILY, text, tools=(), tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


@pytest.mark.parametrize("text", ["[1, 2]", "[a link](x)", "[other(a=1)]", "[now]", "[", "a[b("])
def test_brackets_in_prose_are_prose(text):
    check_prose(FAMILY, text, tools=TOOLS)


def test_without_tools_calls_are_text():
    check_prose(FAMILY, CALL, tools=())


def test_unescaped_strings_of_the_template_are_parsed(shared):
    source = template(shared, "hfjinja-LiquidAI_LFM2.5-VL-450M.jinja")
    assert FAMILY.matches(source)
    text = CALL.replace("Oslo", 'a "quoted"\nC:\\path')
    assert [call.arguments for call in collect_calls(check_text(FAMILY, text, tools=TOOLS))] == [
        r'{"city": "a \"quoted\"\nC:\\path"}'
    ]


def test_a_json_list_between_the_tags_is_parsed():
    text = '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>'
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [("now", "{}")]


def test_an_invalid_call_is_text():
    text = "<|tool_call_start|>get_weather<|tool_call_end|>"
    check_prose(FAMILY, text, tools=TOOLS)


def test_invalid_arguments_are_passed_through():
    text = CALL.replace('"Oslo"', "Oslo") + "Done."
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": Oslo)]']
    assert join_content(pieces) == "Done."


def test_a_marker_within_an_argument_does_not_end_the_call():
    pieces = check_text(FAMILY, CALL.replace("Oslo", "<|tool_call_end|>"), tools=TOOLS)
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": "<|tool_call_end|>"}']


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))
