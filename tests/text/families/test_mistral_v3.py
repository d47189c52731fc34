"""Mistral's calls up to Small 3.1: a JSON array."""

from dataclasses import replace

from hypothesis import given

from app.text.families.mistral_v3 import Family
from tests.text.families.reading import (
    calls,
    check_prose,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
)
from tests.text.families.rows import law, llamacpp, roundtrip
from tests.text.families.walking import TOOLS, WEATHER, Walk, check_walks

FAMILY = Family()
TEMPLATES = ("mistralai-Mistral-Nemo-Instruct-2407.jinja",)
MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]")


def test_what_its_models_wrote_is_read(shared):
    """But for the ids, which stand behind the arguments: the calls have been given out by then."""
    for row in law((*roundtrip(shared, *TEMPLATES), *llamacpp(shared, *TEMPLATES)), {}):
        expected = tuple({**call, "id": None} for call in row.calls or ())
        check_row(FAMILY, replace(row, calls=expected))


def test_an_id_before_the_arguments_is_the_call_s():
    text = '[TOOL_CALLS] [{"id": "abcdefghi", "name": "f", "arguments": {}}]'
    assert calls(check_text(FAMILY, text, tools=[WEATHER]))[0].id == "abcdefghi"


def test_an_id_has_nine_letters_or_digits_and_is_new_each_time():
    ids = {FAMILY.make_call_id(0) for _ in range(50)}
    assert len(ids) == 50
    assert all(id and len(id) == 9 and id.isalnum() and id.isascii() for id in ids)


def test_a_list_that_goes_wrong_behind_a_call_is_text_from_there():
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"nome": 1}] oh'
    pieces = check_text(FAMILY, text, tools=[WEATHER])
    assert [(call.name, call.arguments) for call in calls(pieces)] == [("f", "{}")]
    assert content(pieces) == ', {"nome": 1}] oh'


def test_a_list_without_a_call_is_text():
    check_prose(FAMILY, "[TOOL_CALLS][]", tools=[WEATHER])
    check_prose(FAMILY, '[TOOL_CALLS][{"arguments": {}}]', tools=[WEATHER])


@given(mixtures(*MARKERS))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=[WEATHER], syntax=MARKERS)


@given(prose(*MARKERS))
def test_text_without_markers_stays_as_it_is(text):
    check_prose(FAMILY, text, tools=[WEATHER])


def test_what_its_syntax_produces_is_read_back():
    check_walks(FAMILY, TOOLS)


def test_its_syntax_is_what_the_templates_write_with_the_ids_or_without(shared):
    for row in roundtrip(shared, *TEMPLATES):
        text = row.output.replace(', "id": "call00000"', "").replace(', "id": "call00001"', "")
        walk = Walk(FAMILY, row.tools)
        assert walk.accepts(text), row.id
        assert walk.accepts(row.output), row.id
        assert walk.accepts(text.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")), row.id
