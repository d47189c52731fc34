"""Kimi K2 and K2 Thinking."""

from hypothesis import given

from app.text.families.kimi import Family
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
from tests.text.families.rows import llamacpp, mlx_lm, roundtrip, select_rows
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, Walk, check_walks

FAMILY = Family()
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("</think>")

TEMPLATES = ("moonshotai-Kimi-K2.jinja", "Kimi-K2-Instruct.jinja", "Kimi-K2-Thinking.jinja")
CALL = (
    "<|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
)
SECTION = f"<|tool_calls_section_begin|>{CALL}<|tool_calls_section_end|>"


def test_real_model_outputs_are_parsed(shared):
    rows = [
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, *TEMPLATES),
        *mlx_lm(shared, "kimi_k2"),
    ]
    for row in select_rows(rows, {}):
        check_row(FAMILY, row)


@given(mixtures(*FAMILY.markers, CALL, "functions.now:1", "now"))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=FAMILY.markers)
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    check_prose(FAMILY, SECTION, tools=())


def test_the_call_id_is_the_one_in_the_output():
    pieces = check_text(FAMILY, SECTION, tools=TOOLS)
    assert [(call.name, call.id) for call in collect_calls(pieces)] == [
        ("get_weather", "functions.get_weather:0")
    ]


def test_an_id_in_another_format_is_the_function_name():
    text = SECTION.replace("functions.get_weather:0", "get_weather")
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [(call.name, call.id) for call in collect_calls(pieces)] == [("get_weather", None)]


def test_a_call_may_come_before_reasoning_is_closed():
    pieces = check_text(FAMILY, f"<think>Look it up. {SECTION}", tools=TOOLS, tags=TAGS)
    assert join_reasoning(pieces) == "Look it up."
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": "Oslo"}']


def test_a_section_without_a_call_is_text():
    text = "<|tool_calls_section_begin|> nothing <|tool_call_begin|>no id here"
    check_prose(FAMILY, text, tools=TOOLS)


def test_invalid_arguments_are_passed_through():
    text = SECTION.replace('"Oslo"', "Oslo")
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": Oslo}']
    assert join_content(pieces) == ""


def test_a_marker_within_an_argument_does_not_end_the_call():
    text = SECTION.replace("Oslo", "<|tool_call_end|>")
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": "<|tool_call_end|>"}']


def test_a_call_without_arguments_has_an_empty_object():
    text = SECTION.replace('{"city": "Oslo"}', "")
    assert [call.arguments for call in collect_calls(check_text(FAMILY, text, tools=TOOLS))] == [
        "{}"
    ]


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))


def test_the_grammar_accepts_template_output(shared):
    rows = roundtrip(shared, *TEMPLATES)
    walk = Walk(FAMILY, rows[0].tools)
    assert all(walk.accepts(row.output) for row in rows)
