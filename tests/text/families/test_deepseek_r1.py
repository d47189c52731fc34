"""DeepSeek R1's and V3's calls: JSON in a code block after the name."""

from dataclasses import replace

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
    mixtures,
    prose,
)
from tests.text.families.rows import llamacpp, ollama, select_rows
from tests.text.families.walking import TOOLS, WEATHER, check_walks

FAMILY = load_families()["deepseek_r1"]
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
EXCLUDED = {
    "ollama-cogito-5": "ollama reads a whole number as a float",
    "ollama-cogito-6": "ollama removes tool results, which occur only in prompts",
}
# rows without a prompt, of a template that opens the reasoning
OPENED = {"llamacpp-4006-198"}


def test_real_model_outputs_are_parsed(shared):
    rows = (*llamacpp(shared, *TEMPLATES), *ollama(shared, "cogito"))
    for row in select_rows(rows, EXCLUDED):
        check_row(FAMILY, replace(row, in_reasoning=True) if row.id in OPENED else row)


def test_a_marker_within_a_string_does_not_end_the_call():
    arguments = '{"a": "```<｜tool▁call▁end｜>"}'
    text = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{arguments}\n```"
    assert collect_calls(check_text(FAMILY, text, tools=[WEATHER]))[0].arguments == arguments


@pytest.mark.parametrize(
    "text",
    [
        "<｜tool▁calls▁begin｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{"a": 1}<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜><｜tool▁sep｜>```json\n{}\n```",
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
