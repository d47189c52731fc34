"""Command R7B, Command A and Command A Reasoning."""

from hypothesis import given

from app.text.family import load_families
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
from tests.text.families.rows import llamacpp, roundtrip, select_rows
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, Walk, check_walks

FAMILY = load_families()["cohere"]
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("")

TEMPLATE = "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja"
EXCLUDED = {
    "llamacpp-2291-39": "llama.cpp was asked to leave reasoning in the content",
    "llamacpp-2307-41": "cut before the arguments, which begin a call in this parser",
}

ACTION = '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}'
ACTIONS = f"<|START_ACTION|>[\n    {ACTION}\n]<|END_ACTION|>"


def test_real_model_outputs_are_parsed(shared):
    rows = [*roundtrip(shared, TEMPLATE), *llamacpp(shared, TEMPLATE)]
    for row in select_rows(rows, EXCLUDED):
        check_row(FAMILY, row)


@given(mixtures(*FAMILY.markers, ACTION, '"tool_name": "now"', '"parameters": '))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=FAMILY.markers)
    check_text(FAMILY, text, tools=(), tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    check_prose(FAMILY, ACTIONS, tools=())


def test_reasoning_may_come_between_the_parts():
    reasoning = "<|START_THINKING|>Look it up.<|END_THINKING|>"
    text = f"{reasoning}{ACTIONS}{reasoning}<|START_RESPONSE|>It rains.<|END_RESPONSE|>"
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
    assert join_reasoning(pieces) == "Look it up." * 2
    assert join_content(pieces) == "It rains."
    assert [(call.name, call.id) for call in collect_calls(pieces)] == [("get_weather", "0")]


def test_an_invalid_list_of_calls_is_text():
    text = '<|START_ACTION|>[{"tool_call_id": "0"}]<|END_ACTION|>'
    check_prose(FAMILY, text, tools=TOOLS)


def test_invalid_arguments_are_passed_through():
    text = ACTIONS.replace('"Oslo"', "Oslo")
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": Oslo}']
    assert join_content(pieces) == ""


def test_a_marker_within_an_argument_does_not_end_the_call():
    pieces = check_text(FAMILY, ACTIONS.replace("Oslo", "<|END_ACTION|>"), tools=TOOLS)
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": "<|END_ACTION|>"}']


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))


def test_the_grammar_accepts_template_output(shared):
    rows = roundtrip(shared, TEMPLATE)
    walk = Walk(FAMILY, rows[0].tools)
    # the template continues with the next turn
    outputs = (row.output.partition("<|END_OF_TURN_TOKEN|>")[0] for row in rows)
    assert all(map(walk.accepts, outputs))
