"""Kimi K2 and K2 Thinking."""

from hypothesis import given

from app.text.families.kimi import Family
from tests.text.families.reading import (
    calls,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
    reasoning,
)
from tests.text.families.rows import law, llamacpp, mlx_lm, roundtrip
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


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    rows = [
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, *TEMPLATES),
        *mlx_lm(shared, "kimi_k2"),
    ]
    for row in law(rows, {}):
        check_row(FAMILY, row)


@given(mixtures(*FAMILY.markers, CALL, "functions.now:1", "now"))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=FAMILY.markers)
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, SECTION, tools=())) == SECTION


def test_the_id_is_the_one_that_the_model_wrote():
    pieces = check_text(FAMILY, SECTION, tools=TOOLS)
    assert [(call.name, call.id) for call in calls(pieces)] == [
        ("get_weather", "functions.get_weather:0")
    ]


def test_an_id_of_another_form_names_the_function_and_is_no_id():
    text = SECTION.replace("functions.get_weather:0", "get_weather")
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [(call.name, call.id) for call in calls(pieces)] == [("get_weather", None)]


def test_a_call_may_come_before_the_thoughts_are_closed():
    pieces = check_text(FAMILY, f"<think>Look it up. {SECTION}", tools=TOOLS, tags=TAGS)
    assert reasoning(pieces) == "Look it up."
    assert [call.arguments for call in calls(pieces)] == ['{"city": "Oslo"}']


def test_a_section_without_a_call_stays_text():
    text = "<|tool_calls_section_begin|> nothing <|tool_call_begin|>no id here"
    assert content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_arguments_that_are_broken_are_handed_on_as_they_are():
    text = SECTION.replace('"Oslo"', "Oslo")
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in calls(pieces)] == ['{"city": Oslo}']
    assert content(pieces) == ""


def test_a_marker_within_an_argument_does_not_end_the_call():
    text = SECTION.replace("Oslo", "<|tool_call_end|>")
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in calls(pieces)] == ['{"city": "<|tool_call_end|>"}']


def test_a_call_without_arguments_has_an_empty_object():
    text = SECTION.replace('{"city": "Oslo"}', "")
    assert [call.arguments for call in calls(check_text(FAMILY, text, tools=TOOLS))] == ["{}"]


def test_what_its_grammar_produces_are_calls_that_satisfy_their_schemas():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))


def test_its_grammar_accepts_what_the_template_writes(shared):
    rows = roundtrip(shared, *TEMPLATES)
    walk = Walk(FAMILY, rows[0].tools)
    assert all(walk.accepts(row.output) for row in rows)
