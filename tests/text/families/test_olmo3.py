"""OLMo 3. Its template is not in the test data."""

from dataclasses import replace

from hypothesis import given

from app.text.families.python_calls import FAMILIES
from tests.text.families.reading import (
    check_row,
    check_text,
    collect_calls,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.rows import ANY, ollama, select_rows
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, check_walks

FAMILY = FAMILIES["olmo3"]
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("</think>")

EXCLUDED = {
    "ollama-olmo3_think-257": "continues an answer of the prompt without reasoning",
    "ollama-olmo3_think-258": "ollama keeps white space at the start of the reasoning",
}

CALLS = '<function_calls>get_weather(city="Oslo")\nnow()</function_calls>'


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows(ollama(shared, "olmo3"), EXCLUDED):
        # ollama also parses calls to unknown tools
        check_row(FAMILY, replace(row, tools=row.tools or (ANY,)))


def test_a_template_is_recognized_by_its_two_tags():
    assert FAMILY.matches("<functions>' + tools + '</functions> … <function_calls>")
    assert not FAMILY.matches("<functions></functions>")


@given(mixtures(*FAMILY.markers, CALLS, "now(", "now", "get_weather(city=", "'", ")", "="))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=FAMILY.markers)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert join_content(check_text(FAMILY, CALLS, tools=())) == CALLS


def test_calls_are_separated_by_line_breaks():
    pieces = check_text(FAMILY, f"I look.\n{CALLS}", tools=TOOLS)
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]
    assert join_content(pieces) == "I look."


def test_an_invalid_call_is_text():
    text = "<function_calls>nothing to call</function_calls>"
    assert join_content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))
