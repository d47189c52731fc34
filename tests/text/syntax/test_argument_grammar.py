"""Lists of pairs, some of which may be left out."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from app.text.syntax.argument_grammar import (
    build_argument_grammar,
    extract_schema,
    has_only_keywords,
)


def rules_of(schema):
    return build_argument_grammar(schema, "x", separator='","', pair=lambda name, _: f'"{name}"')


@settings(max_examples=15)
@given(st.sets(st.sampled_from("abcd")))
def test_those_that_are_required_stand_there_and_the_others_may(required):
    schema = {"properties": {name: {} for name in "abcd"}, "required": sorted(required)}
    found = rules_of(schema)
    assert found is not None
    grammar = "\n".join((f"start: {found.expression}", *found.rules))
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for chosen in product((False, True), repeat=4):
        names = [name for name, here in zip("abcd", chosen, strict=True) if here]
        text = list(",".join(names).encode())
        matcher.reset()
        whole = matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()
        assert whole == (required <= set(names)), names


def test_there_may_be_none_at_all():
    found = rules_of({})
    assert found is not None
    assert (found.expression, found.rules) == ("", ())


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"minProperties": 1},
        {"properties": []},
        {"required": ["a"]},
        {"required": [[]]},
        {"required": "a"},
    ],
)
def test_what_a_list_cannot_be_held_to_has_no_rules(schema):
    assert rules_of(schema) is None


def test_a_pair_that_cannot_be_written_leaves_no_rules():
    schema = {"properties": {"a": {}, "b": {}}}
    none = build_argument_grammar(schema, "x", separator='","', pair=lambda name, _: None)
    assert none is None


def test_a_part_takes_what_it_refers_to_with_it():
    root = {"$defs": {"t": {"type": "string"}}, "properties": {}}
    alone = extract_schema({"$ref": "#/$defs/t"}, root)
    assert alone is not None
    assert alone["$defs"] == root["$defs"]
    assert "$defs" not in (extract_schema({"type": "string"}, root) or {})


def test_a_part_that_says_no_type_may_be_of_any():
    assert set((extract_schema(True, {}) or {})["type"]) == {
        *("null", "boolean", "number", "string", "array", "object"),
    }


@pytest.mark.parametrize("part", [{"$ref": "#"}, {"items": [{"$ref": "#/properties/a"}]}, False, 3])
def test_a_part_that_refers_to_anything_else_cannot_stand_alone(part):
    assert extract_schema(part, {}) is None


def test_titles_say_nothing_about_a_value():
    assert has_only_keywords({"title": "T", "description": "D", "type": "string"}, "type")
    assert not has_only_keywords({"title": "T", "minLength": 1})
