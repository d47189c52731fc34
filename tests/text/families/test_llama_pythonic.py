"""Llama's calls for templates that request Python: a list that is the full answer."""

from hypothesis import given

from app.text.family import load_families
from tests.text.families.reading import (
    check_prose,
    check_text,
    collect_calls,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.rows import templates
from tests.text.families.walking import NOW, TOOLS, WEATHER, Walk, check_walks

FAMILY = load_families()["llama_pythonic"]
TEMPLATE = """{{- '<|start_header_id|>system<|end_header_id|>' }}
{{- "You MUST put it in the format of [func_name1(params_name1=params_value1), func_name2()]" }}"""
CALLS = '[get_weather(city="Oslo"), now()]'


def test_the_family_claims_templates_for_python_calls_but_not_for_json(shared):
    assert FAMILY.matches(TEMPLATE)
    assert not any(map(FAMILY.matches, templates(shared).values()))


def test_a_list_of_calls_is_parsed():
    pieces = check_text(FAMILY, CALLS, tools=[WEATHER, NOW])
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]
    assert not join_content(pieces)


@given(mixtures("[get_weather(", 'city="Oslo"', ")", "]", "now()", "<|python_tag|>"))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=[WEATHER, NOW], syntax=("get_weather", "now"))


@given(prose("<|python_tag|>", "get_weather"))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_the_syntax_of_the_template():
    walk = Walk(FAMILY, [WEATHER, NOW])
    assert walk.accepts(CALLS)
