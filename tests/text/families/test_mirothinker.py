"""MiroThinker's calls: JSON between tags, with the name and the server of the tool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.mirothinker import Family
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


def test_the_family_claims_its_template(shared):
    assert FAMILY.matches(template(shared, "MiroThinker.jinja"))


def test_calls_of_the_template_are_parsed():
    pieces = check_text(FAMILY, f"Let me see.\n{CALLS}\n", tools=[WEATHER])
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
        ("get_weather", '{"city": "Oslo </arguments>"}'),
        ("now", "{}"),
    ]
    assert join_content(pieces) == "Let me see."


@pytest.mark.parametrize(
    "text",
    [
        "<use_mcp_tool>",
        "<use_mcp_tool>\n<server_name>a</server_name>\n</use_mcp_tool>",
        "<use_mcp_tool><tool_name></tool_name><arguments>{}</arguments>",
    ],
)
def test_a_call_without_a_name_is_text(text):
    check_prose(FAMILY, text, tools=[WEATHER])


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_parsing_does_not_depend_on_chunk_boundaries(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output():
    assert Walk(FAMILY, [WEATHER, NOW]).accepts(CALLS)
