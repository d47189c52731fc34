"""Nemotron Nano 2's calls: a JSON array between tags."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.nemotron_v2 import Family
from tests.text.families.reading import check_prose, check_row, check_text, mixtures, prose
from tests.text.families.rows import llamacpp
from tests.text.families.walking import TOOLS, WEATHER, Walk, check_walks

FAMILY = Family()
TAGS = ReasoningTags(open="<think>", close="</think>")
MARKERS = ("<TOOLCALL>", "</TOOLCALL>", "<think>", "</think>")
END_OF_TURN = "<SPECIAL_12>"  # the stop token, which is not part of the answer


def test_real_model_outputs_are_parsed(shared):
    rows = [row for row in llamacpp(shared, None) if row.id == "llamacpp-3908-181"]
    for row in rows:
        check_row(FAMILY, replace(row, output=row.output.removesuffix(END_OF_TURN)))
    assert rows


def test_the_family_claims_its_templates():
    assert FAMILY.matches("{{ '<TOOLCALL>[' }}")
    assert not FAMILY.matches("{{ '<tool_call>' }}")


@given(text=mixtures(*MARKERS), in_reasoning=st.booleans())
def test_parsing_does_not_depend_on_chunk_boundaries(text, in_reasoning):
    check_text(FAMILY, text, tools=[WEATHER], tags=TAGS, in_reasoning=in_reasoning, syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER], tags=TAGS)


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_model_output():
    text = '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>'
    assert Walk(FAMILY, [WEATHER]).accepts(text)
