"""FunctionGemma. Its template is not in the test data."""

from dataclasses import replace

from hypothesis import given

from app.text.families.gemma import FAMILIES
from tests.text.families.reading import (
    check_row,
    check_text,
    collect_calls,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.rows import ANY, mlx_lm, ollama, select_rows
from tests.text.families.walking import NOW, TYPES, WEATHER, check_walks

FAMILY = FAMILIES["function_gemma"]
TOOLS = (WEATHER, NOW)

EXCLUDED = {
    "ollama-functiongemma-76": "ollama keeps white space before a call",
}

CALL = "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>"


def test_real_model_outputs_are_parsed(shared):
    rows = [*ollama(shared, "functiongemma"), *mlx_lm(shared, "function_gemma")]
    for row in select_rows(rows, EXCLUDED):
        # ollama also parses calls to unknown tools
        check_row(FAMILY, replace(row, tools=row.tools or (ANY,), tagged=False))


@given(mixtures(*FAMILY.markers, CALL, "call:now{", "city:", "}"))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, syntax=FAMILY.markers)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_without_tools_calls_are_text():
    assert join_content(check_text(FAMILY, CALL, tools=())) == CALL


def test_a_marker_within_an_argument_does_not_end_the_call():
    pieces = check_text(FAMILY, CALL.replace("Oslo", "<end_function_call>"), tools=TOOLS)
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": "<end_function_call>"}']


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, (WEATHER, NOW, TYPES), endings=("<escape>",))
