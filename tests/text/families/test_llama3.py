"""Llama 3's calls: a JSON object that is the full answer or follows a token."""

import pytest
from hypothesis import given

from app.core.requests import Tool
from app.text.family import load_families
from tests.text.families.reading import (
    check_prose,
    check_row,
    check_text,
    collect_calls,
    join_content,
    mixtures,
    prose,
    read,
)
from tests.text.families.rows import llamacpp, roundtrip, select_rows
from tests.text.families.walking import NOW, TOOLS, WEATHER, check_spelling, check_walks

FAMILY = load_families()["llama3"]
TEMPLATES = (
    "meta-llama-Llama-3.1-8B-Instruct.jinja",
    "meta-llama-Llama-3.2-3B-Instruct.jinja",
    "meta-llama-Llama-3.3-70B-Instruct.jinja",
)
MARKERS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
CALL = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
SEARCH = Tool(name="brave_search", description=None, parameters={})


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows((*roundtrip(shared, *TEMPLATES), *llamacpp(shared, *TEMPLATES)), {}):
        check_row(FAMILY, row)


@pytest.mark.parametrize(
    "text",
    [
        f"{CALL}; {CALL}",
        f"{CALL}\n{CALL}",
        f"{CALL}, {CALL}",
        f"<|python_tag|>{CALL}; {CALL}",
        f"<|python_start|>{CALL}<|python_end|>{CALL}",
        f"{CALL}<|python_tag|>{CALL}",
        '[get_weather(city="Oslo"), get_weather(city="Oslo")]',
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}} ' + CALL,
    ],
)
def test_consecutive_calls_are_all_parsed(text):
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    expected = ("get_weather", '{"city": "Oslo"}')
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [expected] * 2
    assert not join_content(pieces)


def test_text_after_calls_is_content():
    pieces = check_text(FAMILY, f"{CALL}; and so on", tools=[WEATHER])
    assert len(collect_calls(pieces)) == 1
    assert join_content(pieces) == "; and so on"


@pytest.mark.parametrize(
    "text",
    [
        f"Like this: {CALL}",
        '{"name": "missing", "parameters": {}}',
        '{"answer": 42, "name": "get_weather", "parameters": {}}',
        "[1, 2]",
        "[missing(a=1)]",
        "<|python_tag|>print(1)",
        "<|python_tag|>missing.call(a=1)",
        '{"name": "get_weather"',
    ],
)
def test_a_call_must_begin_the_answer_and_name_a_tool(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_an_answer_in_json_is_not_held_back():
    pieces = read(FAMILY, ['{"answer": "It is'], tools=[WEATHER])
    parser = FAMILY.build_parser(tools=[WEATHER], tags=None, in_reasoning=False)
    assert join_content(parser.feed('{"answer": "It is')) == join_content(pieces)


def test_after_the_token_any_name_is_accepted_and_built_in_tools_are_methods():
    text = '<|python_tag|>{"name": "missing", "parameters": {}}'
    assert [call.name for call in collect_calls(check_text(FAMILY, text, tools=[WEATHER]))] == [
        "missing"
    ]
    text = '<|python_tag|>brave_search.call(query="Oslo")'
    found = collect_calls(check_text(FAMILY, text, tools=[SEARCH]))
    assert [(call.name, call.arguments) for call in found] == [
        ("brave_search", '{"query": "Oslo"}')
    ]


def test_invalid_arguments_are_passed_through():
    text = '{"name": "get_weather", "parameters": {"city": Oslo}} or so'
    found = collect_calls(check_text(FAMILY, text, tools=[WEATHER]))
    assert [call.arguments for call in found] == ['{"city": Oslo}']


@given(mixtures(*MARKERS, CALL, "[get_weather(", "now()", ";"))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=[WEATHER, NOW], syntax=(*MARKERS, "get_weather", "now"))


@given(prose(*MARKERS, "get_weather"))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output(shared):
    check_spelling(FAMILY, roundtrip(shared, *TEMPLATES), begin="{")
