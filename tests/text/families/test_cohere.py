"""Command R7B, Command A and Command A Reasoning."""

from hypothesis import given

from app.text.families.cohere import Family
from tests.text.families.reading import (
    calls,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
    reasoning,
)
from tests.text.families.rows import law, llamacpp, roundtrip
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, Walk, check_walks

FAMILY = Family()
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("")

TEMPLATE = "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja"
LEFT_OUT = {
    "llamacpp-2291-39": "not split there: reasoning is asked to stay in the content",
    "llamacpp-2307-41": "cut before the arguments: a call begins with them here",
}

ACTION = '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}'
ACTIONS = f"<|START_ACTION|>[\n    {ACTION}\n]<|END_ACTION|>"


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    rows = [*roundtrip(shared, TEMPLATE), *llamacpp(shared, TEMPLATE)]
    for row in law(rows, LEFT_OUT):
        check_row(FAMILY, row)


@given(mixtures(*FAMILY.markers, ACTION, '"tool_name": "now"', '"parameters": '))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=FAMILY.markers)
    check_text(FAMILY, text, tools=(), tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, ACTIONS, tools=())) == ACTIONS


def test_thoughts_may_come_between_the_parts():
    thought = "<|START_THINKING|>Look it up.<|END_THINKING|>"
    text = f"{thought}{ACTIONS}{thought}<|START_RESPONSE|>It rains.<|END_RESPONSE|>"
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
    assert reasoning(pieces) == "Look it up." * 2
    assert content(pieces) == "It rains."
    assert [(call.name, call.id) for call in calls(pieces)] == [("get_weather", "0")]


def test_what_is_no_list_of_calls_stays_text():
    text = '<|START_ACTION|>[{"tool_call_id": "0"}]<|END_ACTION|>'
    assert content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_arguments_that_are_broken_are_handed_on_as_they_are():
    text = ACTIONS.replace('"Oslo"', "Oslo")
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in calls(pieces)] == ['{"city": Oslo}}\n]']
    assert content(pieces) == ""


def test_a_marker_within_an_argument_does_not_end_the_call():
    pieces = check_text(FAMILY, ACTIONS.replace("Oslo", "<|END_ACTION|>"), tools=TOOLS)
    assert [call.arguments for call in calls(pieces)] == ['{"city": "<|END_ACTION|>"}']


def test_what_its_grammar_produces_are_calls_that_satisfy_their_schemas():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))


def test_its_grammar_accepts_what_the_template_writes(shared):
    rows = roundtrip(shared, TEMPLATE)
    walk = Walk(FAMILY, rows[0].tools)
    # the template goes on with the next turn
    written = (row.output.partition("<|END_OF_TURN_TOKEN|>")[0] for row in rows)
    assert all(map(walk.accepts, written))
