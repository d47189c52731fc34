"""Mistral's calls since Devstral 2507: a name and JSON. Reasoning stands anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.mistral_v13 import Family
from tests.text.families.reading import (
    calls,
    check_prose,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
    reasoning,
)
from tests.text.families.rows import law, llamacpp, mlx_lm, ollama, roundtrip
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = Family()
TAGS = ReasoningTags(open="[THINK]", close="[/THINK]")
MINISTRAL = "mistralai-Ministral-3-14B-Reasoning-2512.jinja"
TEMPLATES = (MINISTRAL, "unsloth-mistral-Devstral-Small-2507.jinja")
MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
LEFT_OUT = {
    "llamacpp-2106-26": "llama.cpp takes a code block off an answer that was asked for as JSON",
}


def test_what_its_models_wrote_is_read(shared):
    rows = (
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, *TEMPLATES),
        *mlx_lm(shared, "mistral"),
        *ollama(shared, "ministral", name=MINISTRAL),
    )
    for row in law(rows, LEFT_OUT):
        check_row(FAMILY, row)


def test_models_that_reason_in_other_tags_are_read_too():
    assert FAMILY.reasoning_tags("[TOOL_CALLS] <think></think>") == ReasoningTags(
        open="<think>", close="</think>"
    )
    assert FAMILY.reasoning_tags("[TOOL_CALLS]") is None


def test_reasoning_stands_between_calls_too():
    text = "[THINK]a[/THINK]b[TOOL_CALLS]f[ARGS]{}[THINK]c [TOOL_CALLS]g[ARGS]{}[/THINK]d"
    pieces = check_text(FAMILY, text, tools=[WEATHER], tags=TAGS)
    assert content(pieces) == "bd"
    assert reasoning(pieces) == "ac [TOOL_CALLS]g[ARGS]{}"
    assert [call.name for call in calls(pieces)] == ["f"]


def test_a_call_that_goes_wrong_ends_where_the_next_one_begins():
    text = '[TOOL_CALLS]f[ARGS]{"a": oh}[TOOL_CALLS]g[ARGS]{}'
    found = calls(check_text(FAMILY, text, tools=[WEATHER]))
    assert [(call.name, call.arguments) for call in found] == [("f", '{"a": oh}'), ("g", "{}")]


def test_the_token_before_the_arguments_may_be_missing():
    found = calls(check_text(FAMILY, '[TOOL_CALLS]f{"a": 1}', tools=[WEATHER]))
    assert [(call.name, call.arguments) for call in found] == [("f", '{"a": 1}')]


@pytest.mark.parametrize("text", ["[TOOL_CALLS]", "[TOOL_CALLS] or so", "[TOOL_CALLS][ARGS]{}"])
def test_what_has_no_name_stays_text(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_any_text_is_read_the_same_however_it_is_cut(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_templates_write(shared):
    check_spelling(FAMILY, roundtrip(shared, *TEMPLATES), begin="[TOOL_CALLS]")
