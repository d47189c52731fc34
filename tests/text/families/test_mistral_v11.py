"""Calls of Mistral Small 3.2: a name, an id and JSON."""

from hypothesis import given

from app.text.families.mistral_v11 import Family
from tests.text.families.reading import check_prose, check_row, check_text, mixtures, prose
from tests.text.families.rows import law, llamacpp, roundtrip
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = Family()
TEMPLATES = ("Mistral-Small-3.2-24B-Instruct-2506.jinja",)
MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]")


def test_what_its_models_wrote_is_read(shared):
    for row in law((*roundtrip(shared, *TEMPLATES), *llamacpp(shared, *TEMPLATES)), {}):
        check_row(FAMILY, row)


def test_an_id_without_a_name_is_text():
    check_prose(FAMILY, '[TOOL_CALLS][CALL_ID]abcdefghi[ARGS]{"a": 1}', tools=[WEATHER])


@given(mixtures(*MARKERS))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_templates_write(shared):
    check_spelling(FAMILY, roundtrip(shared, *TEMPLATES), begin="[TOOL_CALLS]")
