"""Firefunction's calls: a JSON array behind a word."""

import pytest
from hypothesis import given

from app.text.families.firefunction import Family
from tests.text.families.reading import check_prose, check_row, check_text, mixtures, prose
from tests.text.families.rows import law, llamacpp
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = Family()
TEMPLATE = "fireworks-ai-llama-3-firefunction-v2.jinja"
MARKERS = ("functools",)


def test_what_its_models_wrote_is_read(shared):
    for row in law(llamacpp(shared, TEMPLATE), {}):
        check_row(FAMILY, row)


@pytest.mark.parametrize("text", ["import functools\n", "functools[0]", "functools[{}]"])
def test_the_word_alone_begins_no_call(text):
    check_prose(FAMILY, text, tools=[WEATHER])


@given(mixtures(*MARKERS))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_template_writes(shared):
    rows = [row for row in llamacpp(shared, TEMPLATE) if row.calls]
    check_spelling(FAMILY, rows, begin=" functools")
