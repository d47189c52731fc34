"""Functionary 2.2's answers: parts for everybody and for functions."""

from hypothesis import given

from app.text.families.functionary_v22 import Family
from tests.text.families.reading import calls, check_prose, check_text, content, mixtures, prose
from tests.text.families.rows import template
from tests.text.families.walking import NOW, TOOLS, WEATHER, Walk, check_walks

FAMILY = Family()
NEXT = "\n<|from|>assistant\n<|recipient|>"
MARKERS = (NEXT, "all\n<|content|>", "get_weather\n<|content|>", "<|from|>", "<|content|>")


def test_its_template_is_claimed(shared):
    assert FAMILY.matches(template(shared, "hfjinja-meetkai_functionary-medium-v2.2.jinja"))


def test_parts_follow_each_other():
    text = f'all\n<|content|>Let me see.{NEXT}get_weather\n<|content|>{{"city": "Oslo"}}'
    pieces = check_text(FAMILY, text, tools=[WEATHER, NOW])
    assert content(pieces) == "Let me see."
    assert [(call.name, call.arguments) for call in calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}')
    ]


@given(mixtures(*MARKERS))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=("<|content|>",))


@given(prose("<|content|>"))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_template_writes():
    text = f'get_weather\n<|content|>{{"city": "Oslo"}}{NEXT}now\n<|content|>{{}}'
    assert Walk(FAMILY, [WEATHER, NOW]).accepts(text)
