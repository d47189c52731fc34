"""Command R and R+ of 2024."""

from hypothesis import given

from app.text.family import load_families
from tests.text.families.reading import (
    check_row,
    check_text,
    collect_calls,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.rows import llamacpp, select_rows
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, check_walks

FAMILY = load_families()["command_r"]
TOOLS = (WEATHER, NOW)

EXCLUDED = {
    "llamacpp-3931-184": "special tokens, which the text for a family never contains",
}

ACTION = '{"tool_name": "get_weather", "parameters": {"city": "Oslo"}}'
BLOCK = f"Action:\n```json\n[{ACTION}]\n```"


def test_real_model_outputs_are_parsed(shared):
    rows = llamacpp(shared, "CohereForAI-c4ai-command-r-plus-tool_use.jinja")
    for row in select_rows(rows, EXCLUDED):
        check_row(FAMILY, row)


@given(mixtures("Action:", "```", "json", ACTION, '"tool_name": "now"', '"parameters": '))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, syntax=("Action:",))


@given(prose("Action:"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_an_invalid_action_is_text():
    text = "Action: go on. Action: ```json\n[1]```"
    assert join_content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_a_code_block_may_begin_on_the_line_of_the_marker():
    text = f"I will look.\nAction: ```json\n[\n    {ACTION},\n    {ACTION}\n]``` So be it."
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.name for call in collect_calls(pieces)] == ["get_weather"] * 2
    assert join_content(pieces) == "I will look.\n So be it."


def test_without_tools_calls_are_text():
    assert join_content(check_text(FAMILY, BLOCK, tools=())) == BLOCK


def test_a_marker_within_an_argument_does_not_end_the_call():
    pieces = check_text(FAMILY, BLOCK.replace("Oslo", "``` Action:"), tools=TOOLS)
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": "``` Action:"}']


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))
