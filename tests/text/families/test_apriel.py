"""Apriel's calls: a JSON array between tags."""

from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.json_calls import FAMILIES
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
from tests.text.families.rows import llamacpp, roundtrip, select_rows
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = FAMILIES["apriel"]
TAGS = ReasoningTags(open="Here are my reasoning steps:", close="[BEGIN FINAL RESPONSE]")
TEMPLATES = ("Apriel-1.6-15b-Thinker-fixed.jinja", "unsloth-Apriel-1.5.jinja")
MARKERS = (
    "Here are my reasoning steps:",
    "[BEGIN FINAL RESPONSE]",
    "[END FINAL RESPONSE]",
    "<tool_calls>",
    "</tool_calls>",
)
_PROMPT = "llama.cpp includes the end of the prompt in the reasoning"
EXCLUDED = {"llamacpp-4109-217": _PROMPT, "llamacpp-4117-218": _PROMPT}


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows(
        (*roundtrip(shared, *TEMPLATES), *llamacpp(shared, *TEMPLATES)), EXCLUDED
    ):
        check_row(FAMILY, row)


def test_the_model_may_reopen_reasoning_that_the_prompt_opened():
    prompt = "<|begin_assistant|>\nHere are my reasoning steps:\n"
    assert FAMILY.ends_in_reasoning(prompt, TAGS)
    for again in ("", "Here are my reasoning steps:\n"):
        text = f"{again}I think\n[BEGIN FINAL RESPONSE]\nSo.\n[END FINAL RESPONSE]\n"
        pieces = check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=True)
        assert (join_reasoning(pieces), join_content(pieces)) == ("I think", "So.")


def test_calls_follow_reasoning():
    text = (
        "Here are my reasoning steps:\nI think\n[BEGIN FINAL RESPONSE]\n"
        '<tool_calls>[{"name": "f", "arguments": {}, "id": "call_1"}]</tool_calls>'
    )
    pieces = check_text(FAMILY, text, tools=[WEATHER], tags=TAGS)
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [("f", "{}")]
    assert not join_content(pieces)


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_parsing_does_not_depend_on_chunk_boundaries(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output(shared):
    check_spelling(FAMILY, roundtrip(shared, *TEMPLATES), begin="<tool_calls>")
