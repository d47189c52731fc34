"""Llama 3's calls: a JSON object that is the whole answer, or stands behind a token."""

import pytest
from hypothesis import given

from app.core.requests import Tool
from app.text.families.llama3 import Family
from tests.text.families.reading import (
    calls,
    check_prose,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
    read,
)
from tests.text.families.rows import law, llamacpp, roundtrip
from tests.text.families.walking import NOW, TOOLS, WEATHER, check_spelling, check_walks

FAMILY = Family()
TEMPLATES = (
    "meta-llama-Llama-3.1-8B-Instruct.jinja",
    "meta-llama-Llama-3.2-3B-Instruct.jinja",
    "meta-llama-Llama-3.3-70B-Instruct.jinja",
)
MARKERS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
CALL = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
SEARCH = Tool(name="brave_search", description=None, parameters={})


def test_what_its_models_wrote_is_read(shared):
    for row in law((*roundtrip(shared, *TEMPLATES), *llamacpp(shared, *TEMPLATES)), {}):
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
def test_calls_that_follow_each_other_are_all_read(text):
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    expected = ("get_weather", '{"city": "Oslo"}')
    assert [(call.name, call.arguments) for call in calls(pieces)] == [expected] * 2
    assert not content(pieces)


def test_what_stands_behind_calls_is_text():
    pieces = check_text(FAMILY, f"{CALL}; and so on", tools=[WEATHER])
    assert len(calls(pieces)) == 1
    assert content(pieces) == "; and so on"


@pytest.mark.parametrize(
    "text",
    [
        f"Like this: {CALL}",
        '{"name": "nobody", "parameters": {}}',
        '{"answer": 42, "name": "get_weather", "parameters": {}}',
        "[1, 2]",
        "[nobody(a=1)]",
        "<|python_tag|>print(1)",
        "<|python_tag|>nobody.call(a=1)",
        '{"name": "get_weather"',
    ],
)
def test_only_what_begins_the_answer_and_names_a_tool_is_a_call(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_an_answer_in_json_is_not_held_back():
    pieces = read(FAMILY, ['{"answer": "It is'], tools=[WEATHER])
    parser = FAMILY.build_parser(tools=[WEATHER], tags=None, in_reasoning=False)
    assert content(parser.feed('{"answer": "It is')) == content(pieces)


def test_behind_the_token_any_name_is_one_and_built_in_tools_are_called_as_methods():
    text = '<|python_tag|>{"name": "nobody", "parameters": {}}'
    assert [call.name for call in calls(check_text(FAMILY, text, tools=[WEATHER]))] == ["nobody"]
    text = '<|python_tag|>brave_search.call(query="Oslo")'
    found = calls(check_text(FAMILY, text, tools=[SEARCH]))
    assert [(call.name, call.arguments) for call in found] == [
        ("brave_search", '{"query": "Oslo"}')
    ]


def test_what_is_wrong_with_arguments_stands_in_them():
    text = '{"name": "get_weather", "parameters": {"city": Oslo}} or so'
    found = calls(check_text(FAMILY, text, tools=[WEATHER]))
    assert [call.arguments for call in found] == ['{"city": Oslo}} or so']


@given(mixtures(*MARKERS, CALL, "[get_weather(", "now()", ";"))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=[WEATHER, NOW], syntax=(*MARKERS, "get_weather", "now"))


@given(prose(*MARKERS, "get_weather"))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_templates_write(shared):
    check_spelling(FAMILY, roundtrip(shared, *TEMPLATES), begin="{")
