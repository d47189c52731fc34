"""DeepSeek V3.1's calls: JSON after the name."""

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
    mixtures,
    prose,
)
from tests.text.families.rows import llamacpp, ollama, select_rows
from tests.text.families.walking import TOOLS, WEATHER, Walk, check_walks

FAMILY = load_families()["deepseek_v31"]
TAGS = ReasoningTags(open="<think>", close="</think>")
TEMPLATE = "deepseek-ai-DeepSeek-V3.1.jinja"
MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<think>",
    "</think>",
)
_RESULT = "ollama removes tool results, which occur only in prompts"
EXCLUDED = {
    "llamacpp-3042-110": "llama.cpp includes the line break after the reasoning in it",
    **{f"ollama-deepseek3-{n}": _RESULT for n in (23, 28, 35, 36, 40, 45, 49, 61)},
    "ollama-deepseek3-46": "ollama keeps the white space beside calls",
    "ollama-deepseek3-55": "ollama drops an invalid call",
    "ollama-deepseek3-59": "ollama drops a partial marker at the end",
    "ollama-deepseek3-62": "ollama parses only one group of calls",
}


def test_real_model_outputs_are_parsed(shared):
    rows = (*llamacpp(shared, TEMPLATE), *ollama(shared, "deepseek-v3.1", name=TEMPLATE))
    for row in select_rows(rows, EXCLUDED):
        check_row(FAMILY, row)


def test_a_second_group_of_calls_is_parsed():
    def group(name: str) -> str:
        call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
        return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"

    pieces = check_text(FAMILY, f"a {group('f')} b {group('g')}", tools=[WEATHER])
    assert [call.name for call in collect_calls(pieces)] == ["f", "g"]
    assert join_content(pieces) == "a  b"


def test_invalid_arguments_are_passed_through():
    text = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{oh}<｜tool▁call▁end｜>!"
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    assert [call.arguments for call in collect_calls(pieces)] == ["{oh}"]
    assert join_content(pieces) == "!"


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_parsing_does_not_depend_on_chunk_boundaries(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output(shared):
    rows = [row for row in llamacpp(shared, TEMPLATE) if row.calls]
    for row in rows:
        text = row.output[row.output.index("<｜tool▁calls▁begin｜>") :]
        assert Walk(FAMILY, row.tools).accepts(text), row.id
    assert rows
