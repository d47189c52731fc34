"""GigaChat 3's calls: a JSON object in a separate turn."""

from hypothesis import given

from app.text.families.json_calls import FAMILIES
from tests.text.families.reading import check_prose, check_row, check_text, mixtures, prose
from tests.text.families.rows import llamacpp, roundtrip, select_rows
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = FAMILIES["gigachat"]
TEMPLATE = "GigaChat3-10B-A1.8B.jinja"
MARKERS = ("<|message_sep|>",)
TURN = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
EXCLUDED = {"GigaChat3-10B-A1.8B/parallel": "the template writes only the first of two calls"}


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows((*roundtrip(shared, TEMPLATE), *llamacpp(shared, TEMPLATE)), EXCLUDED):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, TURN))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output(shared):
    check_spelling(FAMILY, roundtrip(shared, TEMPLATE), begin="<|message_sep|>")
