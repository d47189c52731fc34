"""Llama's calls where the template asks for Python: a list that is the whole answer."""

from hypothesis import given

from app.text.families.llama_pythonic import Family
from tests.text.families.reading import calls, check_prose, check_text, content, mixtures, prose
from tests.text.families.rows import templates
from tests.text.families.walking import NOW, TOOLS, WEATHER, Walk, check_walks

FAMILY = Family()
TEMPLATE = """{{- '<|start_header_id|>system<|end_header_id|>' }}
{{- "You MUST put it in the format of [func_name1(params_name1=params_value1), func_name2()]" }}"""
CALLS = '[get_weather(city="Oslo"), now()]'


def test_a_template_that_asks_for_python_is_claimed_and_one_that_asks_for_json_is_not(shared):
    assert FAMILY.matches(TEMPLATE)
    assert not any(map(FAMILY.matches, templates(shared).values()))


def test_a_list_is_read_as_its_calls():
    pieces = check_text(FAMILY, CALLS, tools=[WEATHER, NOW])
    assert [(call.name, call.arguments) for call in calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]
    assert not content(pieces)


@given(mixtures("[get_weather(", 'city="Oslo"', ")", "]", "now()", "<|python_tag|>"))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=[WEATHER, NOW], syntax=("get_weather", "now"))


@given(prose("<|python_tag|>", "get_weather"))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_template_asks_for():
    walk = Walk(FAMILY, [WEATHER, NOW])
    assert walk.accepts(CALLS)
