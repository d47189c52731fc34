"""MiroThinker's calls: JSON between tags, beside the name and the server that the tool is on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.mirothinker import Family
from tests.text.families.reading import calls, check_prose, check_text, content, mixtures, prose
from tests.text.families.rows import template
from tests.text.families.walking import NOW, TOOLS, WEATHER, Walk, check_walks

FAMILY = Family()
TAGS = ReasoningTags(open="<think>", close="</think>")
MARKERS = (
    "<use_mcp_tool>",
    "</use_mcp_tool>",
    "<server_name>",
    "</server_name>",
    "<tool_name>",
    "</tool_name>",
    "<arguments>",
    "</arguments>",
    "<think>",
    "</think>",
)
CALLS = """<use_mcp_tool>
<server_name>generic-extras</server_name>
<tool_name>get_weather</tool_name>
<arguments>
{"city": "Oslo </arguments>"}
</arguments>
<server_name>generic-extras</server_name>
<tool_name>now</tool_name>
<arguments>
{}
</arguments>
</use_mcp_tool>"""


def test_its_template_is_claimed(shared):
    assert FAMILY.matches(template(shared, "MiroThinker.jinja"))


def test_calls_are_read_as_the_template_writes_them():
    pieces = check_text(FAMILY, f"Let me see.\n{CALLS}\n", tools=[WEATHER])
    assert [(call.name, call.arguments) for call in calls(pieces)] == [
        ("get_weather", '{"city": "Oslo </arguments>"}'),
        ("now", "{}"),
    ]
    assert content(pieces) == "Let me see."


@pytest.mark.parametrize(
    "text",
    [
        "<use_mcp_tool>",
        "<use_mcp_tool>\n<server_name>a</server_name>\n</use_mcp_tool>",
        "<use_mcp_tool><tool_name></tool_name><arguments>{}</arguments>",
    ],
)
def test_what_has_no_name_stays_text(text):
    check_prose(FAMILY, text, tools=[WEATHER])


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_any_text_is_read_the_same_however_it_is_cut(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_template_writes():
    assert Walk(FAMILY, [WEATHER, NOW]).accepts(CALLS)
