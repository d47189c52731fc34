"""Jamba's calls: a JSON array between tags, an object a line."""

from hypothesis import given

from app.text.families.jamba import Family
from tests.text.families.reading import calls, check_prose, check_text, content, mixtures, prose
from tests.text.families.rows import template
from tests.text.families.walking import NOW, TOOLS, WEATHER, Walk, check_walks

FAMILY = Family()
MARKERS = ("<tool_calls>", "</tool_calls>")
CALLS = """<tool_calls>[
{"name": "get_weather", "arguments": {"city": "Oslo"}},
{"name": "now", "arguments": {}}
]</tool_calls>"""


def test_its_template_is_claimed(shared):
    assert FAMILY.matches(template(shared, "hfjinja-ai21labs_AI21-Jamba-Large-1.6.jinja"))


def test_calls_are_read_as_the_template_writes_them():
    pieces = check_text(FAMILY, f" Let me see.\n{CALLS}\n", tools=[WEATHER])
    assert [(call.name, call.arguments) for call in calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]
    assert content(pieces) == " Let me see."


@given(mixtures(*MARKERS))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_template_writes():
    assert Walk(FAMILY, [WEATHER, NOW]).accepts(CALLS)
