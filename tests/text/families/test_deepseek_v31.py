"""DeepSeek V3.1's calls: JSON behind the name."""

from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.deepseek_v31 import Family
from tests.text.families.reading import (
    calls,
    check_prose,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
)
from tests.text.families.rows import law, llamacpp, ollama
from tests.text.families.walking import TOOLS, WEATHER, Walk, check_walks

FAMILY = Family()
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
_RESULT = "ollama takes results of tools, which only prompts hold, off the answer"
LEFT_OUT = {
    "llamacpp-3042-110": "llama.cpp moves the line's end behind reasoning into it",
    **{f"ollama-deepseek3-{n}": _RESULT for n in (23, 28, 35, 36, 40, 45, 49, 61)},
    "ollama-deepseek3-46": "ollama keeps the white space beside calls",
    "ollama-deepseek3-55": "ollama drops a call that cannot be read",
    "ollama-deepseek3-59": "ollama drops the beginning of a marker at the end",
    "ollama-deepseek3-62": "ollama reads one group of calls only",
}


def test_what_its_models_wrote_is_read(shared):
    rows = (*llamacpp(shared, TEMPLATE), *ollama(shared, "deepseek-v3.1", name=TEMPLATE))
    for row in law(rows, LEFT_OUT):
        check_row(FAMILY, row)


def test_a_second_group_of_calls_is_read_too():
    def group(name: str) -> str:
        call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
        return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"

    pieces = check_text(FAMILY, f"a {group('f')} b {group('g')}", tools=[WEATHER])
    assert [call.name for call in calls(pieces)] == ["f", "g"]
    assert content(pieces) == "ab"


def test_what_is_wrong_with_arguments_stands_in_them():
    text = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{oh}<｜tool▁call▁end｜>!"
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    assert [call.arguments for call in calls(pieces)] == ["{oh}"]
    assert content(pieces) == "!"


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_any_text_is_read_the_same_however_it_is_cut(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_template_writes(shared):
    spelled = [row for row in llamacpp(shared, TEMPLATE) if row.calls]
    for row in spelled:
        text = row.output[row.output.index("<｜tool▁calls▁begin｜>") :]
        assert Walk(FAMILY, row.tools).accepts(text), row.id
    assert spelled
