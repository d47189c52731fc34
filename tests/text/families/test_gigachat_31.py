"""GigaChat 3.1's calls: a JSON object behind a token."""

from hypothesis import given

from app.text.families.gigachat_31 import Family
from tests.text.families.reading import check_prose, check_row, check_text, mixtures, prose
from tests.text.families.rows import law, llamacpp, roundtrip
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = Family()
TEMPLATE = "GigaChat3.1-10B-A1.8B.jinja"
MARKERS = ("<|function_call|>",)
LEFT_OUT = {"GigaChat3.1-10B-A1.8B/parallel": "the template writes the first of two calls only"}


def test_what_its_models_wrote_is_read(shared):
    for row in law((*roundtrip(shared, TEMPLATE), *llamacpp(shared, TEMPLATE)), LEFT_OUT):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_template_writes(shared):
    check_spelling(FAMILY, roundtrip(shared, TEMPLATE), begin="<|function_call|>")
