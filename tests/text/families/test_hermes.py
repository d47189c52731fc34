"""Hermes' calls: JSON objects between tags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.hermes import Family
from tests.text.families.reading import (
    Call,
    calls,
    check_prose,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
    read,
    reasoning,
)
from tests.text.families.rows import law, llamacpp, mlx_lm, ollama, roundtrip
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
LEFT_OUT = {
    "llamacpp-3840-173": "llama.cpp writes the arguments again: a space that the model did not",
}


def test_what_its_models_wrote_is_read(shared):
    rows = (
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, *TEMPLATES),
        *mlx_lm(shared, "json_tools"),
        *ollama(shared, "qwen3 hermes"),
    )
    for row in law(rows, LEFT_OUT):
        check_row(FAMILY, row)


def test_a_name_is_known_before_its_arguments_are():
    parser = FAMILY.build_parser(tools=[WEATHER], tags=None, in_reasoning=False)
    pieces = parser.feed('<tool_call>\n{"name": "get_weather", "arguments": ')
    assert calls(pieces) == [Call(name="get_weather", id=None, arguments="")]
    assert calls([*pieces, *parser.feed('{"city": "Os')])[0].arguments == '{"city": "Os'


def test_a_marker_within_a_string_ends_nothing():
    text = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>!'
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    assert [call.arguments for call in calls(pieces)] == ['{"a": "</tool_call><tool_call>"}']
    assert content(pieces) == "!"


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
def test_what_has_no_name_stays_text(text):
    check_prose(FAMILY, text, tools=[WEATHER])


@pytest.mark.parametrize(
    ("rest", "arguments", "said"),
    [
        ('{"city": Oslo}}</tool_call> done', '{"city": Oslo}}', "done"),
        ('{"city": "Oslo"', '{"city": "Oslo"', ""),
        ('{"city": "Oslo"}, oops}</tool_call>', '{"city": "Oslo"}, oops}', ""),
        ('{"city": 1 <tool_call>{"name": "now"}', '{"city": 1 ', ""),
    ],
)
def test_what_is_wrong_with_arguments_stands_in_them(rest, arguments, said):
    text = f'<tool_call>{{"name": "get_weather", "arguments": {rest}'
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    assert calls(pieces)[0].arguments == arguments
    assert content(pieces) == said


def test_without_tools_nothing_is_a_call():
    check_prose(FAMILY, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', tools=[])


def test_what_looks_like_a_call_in_reasoning_is_none():
    text = '<think>\n<tool_call>{"name": "f"}</tool_call>\n</think>\n\nNo.'
    pieces = read(FAMILY, [text], tools=[WEATHER], tags=TAGS)
    assert reasoning(pieces) == '<tool_call>{"name": "f"}</tool_call>'
    assert content(pieces) == "No."
    assert not calls(pieces)


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_any_text_is_read_the_same_however_it_is_cut(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_templates_write(shared):
    rows = [row for row in roundtrip(shared, *TEMPLATES) if "Reka" not in row.id]
    check_spelling(FAMILY, rows, begin="<tool_call>")
