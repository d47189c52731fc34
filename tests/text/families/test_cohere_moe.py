"""Cohere2MoE."""

from app.text.families.cohere_moe import Family
from tests.text.families.reading import check_row, check_text, content
from tests.text.families.rows import law, llamacpp
from tests.text.families.walking import WEATHER, check_walks

FAMILY = Family()

LEFT_OUT = {
    "llamacpp-2339-44": "not split there: reasoning is asked to stay in the content",
    "llamacpp-2425-53": "cut before the arguments: a call begins with them here",
}


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    for row in law(llamacpp(shared, "Cohere2MoE.jinja"), LEFT_OUT):
        check_row(FAMILY, row)


def test_text_stands_between_its_own_tokens():
    text = f"{FAMILY.content_prefix}Hello\n{FAMILY.content_suffix}"
    assert text == "<|START_TEXT|>Hello\n<|END_TEXT|>"
    assert content(check_text(FAMILY, text, tools=(WEATHER,))) == "Hello"


def test_what_its_grammar_produces_are_calls_that_satisfy_their_schemas():
    check_walks(FAMILY, (WEATHER,))
