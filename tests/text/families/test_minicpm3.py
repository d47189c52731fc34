"""MiniCPM3."""

from hypothesis import given

from app.text.families.minicpm3 import Family
from tests.text.families.reading import (
    calls,
    check_text,
    content,
    mixtures,
    prose,
    reasoning,
)
from tests.text.families.rows import template
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, check_walks

FAMILY = Family()
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("")

CALLS = (
    "<|tool_call_start|>\n```python\n"
    'get_weather(city="Oslo", days=3)\nnow()\n'
    "```\n<|tool_call_end|>"
)


def test_its_template_is_its(shared):
    assert FAMILY.matches(template(shared, "hfjinja-openbmb_MiniCPM3-4B.jinja"))


def test_it_thinks_and_calls():
    text = f"<|thought_start|>\nLook it up.\n<|thought_end|>\n{CALLS}\nDone."
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
    assert reasoning(pieces) == "Look it up."
    assert content(pieces) == "Done."
    assert [(call.name, call.arguments) for call in calls(pieces)] == [
        ("get_weather", '{"city": "Oslo", "days": 3}'),
        ("now", "{}"),
    ]


@given(mixtures(*FAMILY.markers, "```python\n", "now(", "now", "get_weather(city=", "'", ")", "="))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=FAMILY.markers)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALLS, tools=())) == CALLS


def test_what_its_grammar_produces_are_calls_that_satisfy_their_schemas():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))
