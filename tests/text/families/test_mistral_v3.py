"""Mistral's calls up to Small 3.1: a JSON array."""

from dataclasses import replace

from hypothesis import given

from app.text.family import load_families
from tests.text.families.reading import (
    check_prose,
    check_row,
    check_text,
    collect_calls,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.rows import llamacpp, roundtrip, select_rows
from tests.text.families.walking import TOOLS, WEATHER, Walk, check_walks

FAMILY = load_families()["mistral_v3"]
TEMPLATES = ("mistralai-Mistral-Nemo-Instruct-2407.jinja",)
MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]")


def test_real_model_outputs_are_parsed(shared):
    """Except the ids: they follow the arguments, when the calls have already been emitted."""
    for row in select_rows((*roundtrip(shared, *TEMPLATES), *llamacpp(shared, *TEMPLATES)), {}):
        expected = tuple({**call, "id": None} for call in row.calls or ())
        check_row(FAMILY, replace(row, calls=expected))


def test_an_id_before_the_arguments_is_the_call_id():
    text = '[TOOL_CALLS] [{"id": "abcdefghi", "name": "f", "arguments": {}}]'
    assert collect_calls(check_text(FAMILY, text, tools=[WEATHER]))[0].id == "abcdefghi"


def test_ids_are_unique_and_have_nine_letters_or_digits():
    ids = {FAMILY.make_call_id(0) for _ in range(50)}
    assert len(ids) == 50
    assert all(id and len(id) == 9 and id.isalnum() and id.isascii() for id in ids)


def test_the_invalid_rest_of_a_list_is_text():
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"nome": 1}] oh'
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [("f", "{}")]
    assert join_content(pieces) == ', {"nome": 1}] oh'


def test_a_list_without_a_call_is_text():
    check_prose(FAMILY, "[TOOL_CALLS][]", tools=[WEATHER])
    check_prose(FAMILY, '[TOOL_CALLS][{"arguments": {}}]', tools=[WEATHER])


@given(mixtures(*MARKERS))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_is_unchanged(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, TOOLS)


def test_the_grammar_accepts_template_output_with_or_without_ids(shared):
    for row in roundtrip(shared, *TEMPLATES):
        text = row.output.replace(', "id": "call00000"', "").replace(', "id": "call00001"', "")
        walk = Walk(FAMILY, row.tools)
        assert walk.accepts(text), row.id
        assert walk.accepts(row.output), row.id
        assert walk.accepts(text.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")), row.id
