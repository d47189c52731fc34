"""MiniCPM3."""

from hypothesis import given

from app.text.families.python_calls import FAMILIES
from tests.text.families.reading import (
    check_prose,
    check_text,
    collect_calls,
    join_content,
    join_reasoning,
    mixtures,
    prose,
)
from tests.text.families.rows import template
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, check_walks

FAMILY = FAMILIES["minicpm3"]
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("")

CALLS = (
    "<|tool_call_start|>\n```python\n"
    'get_weather(city="Oslo", days=3)\nnow()\n'
    "```\n<|tool_call_end|>"
)


def test_the_family_claims_its_template(shared):
    assert FAMILY.matches(template(shared, "hfjinja-openbmb_MiniCPM3-4B.jinja"))


def test_reasoning_and_calls_are_parsed():
    text = f"<|thought_start|>\nLook it up.\n<|thought_end|>\n{CALLS}\nDone."
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
    assert join_reasoning(pieces) == "Look it up."
    assert join_content(pieces) == "Done."
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
        ("get_weather", '{"city": "Oslo", "days": 3}'),
        ("now", "{}"),
    ]


@given(mixtures(*FAMILY.markers, "```python\n", "now(", "now", "get_weather(city=", "'", ")", "="))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=FAMILY.markers)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    check_prose(FAMILY, CALLS, tools=())


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))
