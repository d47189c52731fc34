"""DeepSeek R1's and V3's calls: JSON in a code block, behind the name."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.deepseek_r1 import Family
from tests.text.families.reading import (
    calls,
    check_prose,
    check_row,
    check_text,
    mixtures,
    prose,
)
from tests.text.families.rows import law, llamacpp, ollama
from tests.text.families.walking import TOOLS, WEATHER, check_walks

FAMILY = Family()
TAGS = ReasoningTags(open="<think>", close="</think>")
TEMPLATES = (
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
    "llama-cpp-deepseek-r1.jinja",
)
MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "```json",
    "```",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<think>",
    "</think>",
)
LEFT_OUT = {
    "ollama-cogito-5": "ollama reads a whole number as a float",
    "ollama-cogito-6": "ollama takes results of tools, which only prompts hold, off the answer",
}
# rows that name no prompt, of a template which opens the reasoning
OPENED = {"llamacpp-4006-198"}


def test_what_its_models_wrote_is_read(shared):
    rows = (*llamacpp(shared, *TEMPLATES), *ollama(shared, "cogito"))
    for row in law(rows, LEFT_OUT):
        check_row(FAMILY, replace(row, in_reasoning=True) if row.id in OPENED else row)


def test_a_marker_within_a_string_ends_nothing():
    arguments = '{"a": "```<｜tool▁call▁end｜>"}'
    text = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{arguments}\n```"
    assert calls(check_text(FAMILY, text, tools=[WEATHER]))[0].arguments == arguments


@pytest.mark.parametrize(
    "text",
    [
        "<｜tool▁calls▁begin｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{"a": 1}<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜><｜tool▁sep｜>```json\n{}\n```",
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
