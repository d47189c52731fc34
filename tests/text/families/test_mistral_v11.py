"""Calls of Mistral Small 3.2: a name, an id and JSON."""

from hypothesis import given

from app.text.family import load_families
from tests.text.families.reading import check_prose, check_row, check_text, mixtures, prose
from tests.text.families.rows import llamacpp, roundtrip, select_rows
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = load_families()["mistral_v11"]
TEMPLATES = ("Mistral-Small-3.2-24B-Instruct-2506.jinja",)
MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]")


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows((*roundtrip(shared, *TEMPLATES), *llamacpp(shared, *TEMPLATES)), {}):
        check_row(FAMILY, row)


def test_an_id_without_a_name_is_text():
    check_prose(FAMILY, '[TOOL_CALLS][CALL_ID]abcdefghi[ARGS]{"a": 1}', tools=[WEATHER])


@given(mixtures(*MARKERS))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output(shared):
    check_spelling(FAMILY, roundtrip(shared, *TEMPLATES), begin="[TOOL_CALLS]")
