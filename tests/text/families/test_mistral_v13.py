"""Mistral's calls since Devstral 2507: a name and JSON. Reasoning may come anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.family import load_families
from tests.text.families.reading import (
    check_prose,
    check_row,
    check_text,
    collect_calls,
    join_content,
    join_reasoning,
    mixtures,
    prose,
)
from tests.text.families.rows import llamacpp, mlx_lm, ollama, roundtrip, select_rows
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = load_families()["mistral_v13"]
TAGS = ReasoningTags(open="[THINK]", close="[/THINK]")
MINISTRAL = "mistralai-Ministral-3-14B-Reasoning-2512.jinja"
TEMPLATES = (MINISTRAL, "unsloth-mistral-Devstral-Small-2507.jinja")
MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
EXCLUDED = {
    "llamacpp-2064-21": "llama.cpp was asked to leave reasoning in the content",
    "llamacpp-2118-27": "llama.cpp keeps special tokens in reasoning",
    "llamacpp-2106-26": "llama.cpp removes a code block from a JSON answer",
}


def test_real_model_outputs_are_parsed(shared):
    rows = (
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, *TEMPLATES),
        *mlx_lm(shared, "mistral"),
        *ollama(shared, "ministral", name=MINISTRAL),
    )
    for row in select_rows(rows, EXCLUDED):
        check_row(FAMILY, row)


def test_other_reasoning_tags_are_supported():
    assert FAMILY.reasoning_tags("[TOOL_CALLS] <think></think>") == ReasoningTags(
        open="<think>", close="</think>"
    )
    assert FAMILY.reasoning_tags("[TOOL_CALLS]") is None


def test_reasoning_may_come_between_calls():
    text = "[THINK]a[/THINK]b[TOOL_CALLS]f[ARGS]{}[THINK]c [TOOL_CALLS]g[ARGS]{}[/THINK]d"
    pieces = check_text(FAMILY, text, tools=[WEATHER], tags=TAGS)
    assert join_content(pieces) == "bd"
    assert join_reasoning(pieces) == "acg{}"
    assert [call.name for call in collect_calls(pieces)] == ["f"]


def test_an_invalid_call_ends_where_the_next_one_begins():
    text = '[TOOL_CALLS]f[ARGS]{"a": oh}[TOOL_CALLS]g[ARGS]{}'
    found = collect_calls(check_text(FAMILY, text, tools=[WEATHER]))
    assert [(call.name, call.arguments) for call in found] == [("f", '{"a": oh}'), ("g", "{}")]


def test_the_token_before_the_arguments_may_be_missing():
    found = collect_calls(check_text(FAMILY, '[TOOL_CALLS]f{"a": 1}', tools=[WEATHER]))
    assert [(call.name, call.arguments) for call in found] == [("f", '{"a": 1}')]


@pytest.mark.parametrize("text", ["[TOOL_CALLS]", "[TOOL_CALLS] or so", "[TOOL_CALLS][ARGS]{}"])
def test_a_call_without_a_name_is_text(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_parsing_does_not_depend_on_chunk_boundaries(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output(shared):
    check_spelling(FAMILY, roundtrip(shared, *TEMPLATES), begin="[TOOL_CALLS]")
