"""Cohere2MoE."""

from app.text.family import load_families
from tests.text.families.reading import check_row, check_text, join_content
from tests.text.families.rows import llamacpp, select_rows
from tests.text.families.walking import WEATHER, check_walks

FAMILY = load_families()["cohere_moe"]

EXCLUDED = {
    "llamacpp-2339-44": "llama.cpp was asked to leave reasoning in the content",
    "llamacpp-2425-53": "cut before the arguments, which begin a call in this parser",
}


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows(llamacpp(shared, "Cohere2MoE.jinja"), EXCLUDED):
        check_row(FAMILY, row)


def test_content_has_its_own_markers():
    text = f"{FAMILY.content_prefix}Hello\n{FAMILY.content_suffix}"
    assert text == "<|START_TEXT|>Hello\n<|END_TEXT|>"
    assert join_content(check_text(FAMILY, text, tools=(WEATHER,))) == "Hello"


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, (WEATHER,))
