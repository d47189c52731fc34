"""Command R and R+ of 2024."""

from hypothesis import given

from app.text.families.command_r import Family
from tests.text.families.reading import calls, check_row, check_text, content, mixtures, prose
from tests.text.families.rows import law, llamacpp
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, check_walks

FAMILY = Family()
TOOLS = (WEATHER, NOW)

LEFT_OUT = {
    "llamacpp-3931-184": "special tokens, which are in no text that a family is given",
}

ACTION = '{"tool_name": "get_weather", "parameters": {"city": "Oslo"}}'
BLOCK = f"Action:\n```json\n[{ACTION}]\n```"


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    rows = llamacpp(shared, "CohereForAI-c4ai-command-r-plus-tool_use.jinja")
    for row in law(rows, LEFT_OUT):
        check_row(FAMILY, row)


@given(mixtures("Action:", "```", "json", ACTION, '"tool_name": "now"', '"parameters": '))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, syntax=("Action:",))


@given(prose("Action:"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_an_action_that_is_none_stays_text():
    text = "Action: go on. Action: ```json\n[1]```"
    assert content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_a_block_follows_on_the_same_line_too():
    text = f"I will look.\nAction: ```json\n[\n    {ACTION},\n    {ACTION}\n]``` So be it."
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.name for call in calls(pieces)] == ["get_weather"] * 2
    assert content(pieces) == "I will look.So be it."


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, BLOCK, tools=())) == BLOCK


def test_a_marker_within_an_argument_does_not_end_the_call():
    pieces = check_text(FAMILY, BLOCK.replace("Oslo", "``` Action:"), tools=TOOLS)
    assert [call.arguments for call in calls(pieces)] == ['{"city": "``` Action:"}']


def test_what_its_grammar_produces_are_calls_that_satisfy_their_schemas():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))
