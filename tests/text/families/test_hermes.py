"""Hermes' calls: JSON objects between tags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.hermes import Family
from tests.text.families.reading import (
    Call,
    check_prose,
    check_row,
    check_text,
    collect_calls,
    join_content,
    join_reasoning,
    mixtures,
    prose,
    read,
)
from tests.text.families.rows import llamacpp, mlx_lm, ollama, roundtrip, select_rows
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = Family()
TAGS = ReasoningTags(open="<think>", close="</think>")
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATES = (
    "Bielik-11B-v3.0-Instruct.jinja",
    "MiMo-VL.jinja",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja",
    "Qwen-QwQ-32B.jinja",
    "Qwen-Qwen2.5-7B-Instruct.jinja",
    "Qwen-Qwen3-0.6B.jinja",
    "Reka-Edge.jinja",
    "ortx-qwen2.5.jinja",
    "ortx-qwen3.jinja",
)
EXCLUDED = {
    "llamacpp-3840-173": "llama.cpp reformats the arguments and adds a space",
}


def test_real_model_outputs_are_parsed(shared):
    rows = (
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, *TEMPLATES),
        *mlx_lm(shared, "json_tools"),
        *ollama(shared, "qwen3 hermes"),
    )
    for row in select_rows(rows, EXCLUDED):
        check_row(FAMILY, row)


def test_the_name_is_streamed_before_the_arguments():
    parser = FAMILY.build_parser(tools=[WEATHER], tags=None, in_reasoning=False)
    pieces = parser.feed('<tool_call>\n{"name": "get_weather", "arguments": ')
    assert collect_calls(pieces) == [Call(name="get_weather", id=None, arguments="")]
    assert collect_calls([*pieces, *parser.feed('{"city": "Os')])[0].arguments == '{"city": "Os'


def test_a_marker_within_a_string_does_not_end_the_call():
    text = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>!'
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    assert [call.arguments for call in collect_calls(pieces)] == [
        '{"a": "</tool_call><tool_call>"}'
    ]
    assert join_content(pieces) == "!"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "a <tool_call> b",
        "<tool_call>\n{}\n</tool_call>",
        '<tool_call>{"arguments": {"city": "Oslo"}}</tool_call>',
        '<tool_call>{"name": ["get_weather"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", oh </tool_call>',
        '<tool_call>{"name": "get_weather"',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    ],
)
def test_a_call_without_a_name_is_text(text):
    check_prose(FAMILY, text, tools=[WEATHER])


@pytest.mark.parametrize(
    ("rest", "arguments", "expected_content"),
    [
        ('{"city": Oslo}}</tool_call> done', '{"city": Oslo}', "done"),
        ('{"city": "Oslo"', '{"city": "Oslo"', ""),
        ('{"city": "Oslo"}, oops}</tool_call>', '{"city": "Oslo"}, oops}', ""),
        ('{"city": 1 <tool_call>{"name": "now"}', '{"city": 1 ', ""),
    ],
)
def test_invalid_arguments_are_passed_through(rest, arguments, expected_content):
    text = f'<tool_call>{{"name": "get_weather", "arguments": {rest}'
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    assert collect_calls(pieces)[0].arguments == arguments
    assert join_content(pieces) == expected_content


def test_without_tools_calls_are_text():
    check_prose(FAMILY, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', tools=[])


def test_calls_in_reasoning_are_not_parsed():
    text = '<think>\n<tool_call>{"name": "f"}</tool_call>\n</think>\n\nNo.'
    pieces = read(FAMILY, [text], tools=[WEATHER], tags=TAGS)
    assert join_reasoning(pieces) == '<tool_call>{"name": "f"}</tool_call>'
    assert join_content(pieces) == "No."
    assert not collect_calls(pieces)


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_parsing_does_not_depend_on_chunk_boundaries(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output(shared):
    rows = [row for row in roundtrip(shared, *TEMPLATES) if "Reka" not in row.id]
    check_spelling(FAMILY, rows, begin="<tool_call>")
