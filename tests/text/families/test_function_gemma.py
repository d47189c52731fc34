"""FunctionGemma, of which there is no template here."""

from dataclasses import replace

from hypothesis import given

from app.text.families.function_gemma import Family
from tests.text.families.reading import calls, check_row, check_text, content, mixtures, prose
from tests.text.families.rows import ANY, law, mlx_lm, ollama
from tests.text.families.walking import NOW, TYPES, WEATHER, check_walks

FAMILY = Family()
TOOLS = (WEATHER, NOW)

LEFT_OUT = {
    "ollama-functiongemma-76": "white space before a call is content there",
}

CALL = "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>"


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    rows = [*ollama(shared, "functiongemma"), *mlx_lm(shared, "function_gemma")]
    for row in law(rows, LEFT_OUT):
        # ollama reads calls of tools that nobody offered
        check_row(FAMILY, replace(row, tools=row.tools or (ANY,), tagged=False))


@given(mixtures(*FAMILY.markers, CALL, "call:now{", "city:", "}"))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, syntax=FAMILY.markers)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALL, tools=())) == CALL


def test_a_marker_within_an_argument_does_not_end_the_call():
    pieces = check_text(FAMILY, CALL.replace("Oslo", "<end_function_call>"), tools=TOOLS)
    assert [call.arguments for call in calls(pieces)] == ['{"city": "<end_function_call>"}']


def test_what_its_grammar_produces_are_calls_that_satisfy_their_schemas():
    check_walks(FAMILY, (WEATHER, NOW, TYPES), endings=("<escape>",))
