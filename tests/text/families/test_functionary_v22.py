"""Functionary 2.2's answers: parts for all recipients and for functions."""

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
from tests.text.families.rows import template
from tests.text.families.walking import NOW, TOOLS, WEATHER, Walk, check_walks

FAMILY = load_families()["functionary_v22"]
NEXT = "\n<|from|>assistant\n<|recipient|>"
MARKERS = (NEXT, "all\n<|content|>", "get_weather\n<|content|>", "<|from|>", "<|content|>")


def test_the_family_claims_its_template(shared):
    assert FAMILY.matches(template(shared, "hfjinja-meetkai_functionary-medium-v2.2.jinja"))


def test_consecutive_parts_are_parsed():
    text = f'all\n<|content|>Let me see.{NEXT}get_weather\n<|content|>{{"city": "Oslo"}}'
    pieces = check_text(FAMILY, text, tools=[WEATHER, NOW])
    assert join_content(pieces) == "Let me see."
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}')
    ]


@given(mixtures(*MARKERS))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=("<|content|>",))


@given(prose("<|content|>"))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output():
    text = f'get_weather\n<|content|>{{"city": "Oslo"}}{NEXT}now\n<|content|>{{}}'
    assert Walk(FAMILY, [WEATHER, NOW]).accepts(text)
