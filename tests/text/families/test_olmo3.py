"""OLMo 3, of which there is no template here."""

from dataclasses import replace

from hypothesis import given

from app.text.families.olmo3 import Family
from tests.text.families.reading import calls, check_row, check_text, content, mixtures, prose
from tests.text.families.rows import ANY, law, ollama
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, check_walks

FAMILY = Family()
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("</think>")

LEFT_OUT = {
    "ollama-olmo3_think-257": "goes on with an answer of the prompt, which has no reasoning",
    "ollama-olmo3_think-258": "white space at the beginning of reasoning is kept there",
}

CALLS = '<function_calls>get_weather(city="Oslo")\nnow()</function_calls>'


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    for row in law(ollama(shared, "olmo3"), LEFT_OUT):
        # ollama reads calls of tools that nobody offered
        check_row(FAMILY, replace(row, tools=row.tools or (ANY,)))


def test_it_is_known_by_its_two_tags():
    assert FAMILY.matches("<functions>' + tools + '</functions> … <function_calls>")
    assert not FAMILY.matches("<functions></functions>")


@given(mixtures(*FAMILY.markers, CALLS, "now(", "now", "get_weather(city=", "'", ")", "="))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=FAMILY.markers)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALLS, tools=())) == CALLS


def test_a_call_a_line():
    pieces = check_text(FAMILY, f"I look.\n{CALLS}", tools=TOOLS)
    assert [(call.name, call.arguments) for call in calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]
    assert content(pieces) == "I look."


def test_what_is_no_call_stays_text():
    text = "<function_calls>nothing to call</function_calls>"
    assert content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_what_its_grammar_produces_are_calls_that_satisfy_their_schemas():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))
