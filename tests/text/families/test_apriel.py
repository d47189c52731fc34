"""Apriel's calls: a JSON array between tags."""

from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.apriel import Family
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
from tests.text.families.rows import law, llamacpp, roundtrip
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = Family()
TAGS = ReasoningTags(open="Here are my reasoning steps:", close="[BEGIN FINAL RESPONSE]")
TEMPLATES = ("Apriel-1.6-15b-Thinker-fixed.jinja", "unsloth-Apriel-1.5.jinja")
MARKERS = (
    "Here are my reasoning steps:",
    "[BEGIN FINAL RESPONSE]",
    "[END FINAL RESPONSE]",
    "<tool_calls>",
    "</tool_calls>",
)
_PROMPT = "llama.cpp counts the end of the prompt among the reasoning"
LEFT_OUT = {"llamacpp-4109-217": _PROMPT, "llamacpp-4117-218": _PROMPT}


def test_what_its_models_wrote_is_read(shared):
    for row in law((*roundtrip(shared, *TEMPLATES), *llamacpp(shared, *TEMPLATES)), LEFT_OUT):
        check_row(FAMILY, row)


def test_a_prompt_opens_the_reasoning_and_a_model_may_do_it_again():
    prompt = "<|begin_assistant|>\nHere are my reasoning steps:\n"
    assert FAMILY.ends_in_reasoning(prompt, TAGS)
    for again in ("", "Here are my reasoning steps:\n"):
        text = f"{again}I think\n[BEGIN FINAL RESPONSE]\nSo.\n[END FINAL RESPONSE]\n"
        pieces = check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=True)
        assert (reasoning(pieces), content(pieces)) == ("I think", "So.")


def test_calls_follow_reasoning():
    text = (
        "Here are my reasoning steps:\nI think\n[BEGIN FINAL RESPONSE]\n"
        '<tool_calls>[{"name": "f", "arguments": {}, "id": "call_1"}]</tool_calls>'
    )
    pieces = check_text(FAMILY, text, tools=[WEATHER], tags=TAGS)
    assert [(call.name, call.arguments) for call in calls(pieces)] == [("f", "{}")]
    assert not content(pieces)


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_any_text_is_read_the_same_however_it_is_cut(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_templates_write(shared):
    check_spelling(FAMILY, roundtrip(shared, *TEMPLATES), begin="<tool_calls>")
