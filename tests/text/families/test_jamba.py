"""Jamba's calls: a JSON array between tags, one object per line."""

from hypothesis import given

from app.text.families.jamba import Family
from tests.text.families.reading import (
    check_prose,
    check_text,
    collect_calls,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.rows import template
from tests.text.families.walking import NOW, TOOLS, WEATHER, Walk, check_walks

FAMILY = Family()
MARKERS = ("<tool_calls>", "</tool_calls>")
CALLS = """<tool_calls>[
{"name": "get_weather", "arguments": {"city": "Oslo"}},
{"name": "now", "arguments": {}}
]</tool_calls>"""


def test_the_family_claims_its_template(shared):
    assert FAMILY.matches(template(shared, "hfjinja-ai21labs_AI21-Jamba-Large-1.6.jinja"))


def test_calls_of_the_template_are_parsed():
    pieces = check_text(FAMILY, f" Let me see.\n{CALLS}\n", tools=[WEATHER])
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]
    assert join_content(pieces) == " Let me see."


@given(mixtures(*MARKERS))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output():
    assert Walk(FAMILY, [WEATHER, NOW]).accepts(CALLS)
