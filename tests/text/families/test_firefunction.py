"""Firefunction's calls: a JSON array after a word."""

import pytest
from hypothesis import given

from app.text.families.firefunction import Family
from tests.text.families.reading import check_prose, check_row, check_text, mixtures, prose
from tests.text.families.rows import llamacpp, select_rows
from tests.text.families.walking import TOOLS, WEATHER, check_spelling, check_walks

FAMILY = Family()
TEMPLATE = "fireworks-ai-llama-3-firefunction-v2.jinja"
MARKERS = ("functools",)


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows(llamacpp(shared, TEMPLATE), {}):
        check_row(FAMILY, row)


@pytest.mark.parametrize("text", ["import functools\n", "functools[0]", "functools[{}]"])
def test_the_marker_alone_begins_no_call(text):
    check_prose(FAMILY, text, tools=[WEATHER])


@given(mixtures(*MARKERS))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output(shared):
    rows = [row for row in llamacpp(shared, TEMPLATE) if row.calls]
    check_spelling(FAMILY, rows, begin=" functools")
