"""Grammars of argument lists with optional arguments."""

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


def build_rules(schema):
    return build_argument_grammar(schema, "x", separator='","', pair=lambda name, _: f'"{name}"')


@settings(max_examples=15)
@given(st.sets(st.sampled_from("abcd")))
def test_required_arguments_must_be_present_and_others_may_be(required):
    schema = {"properties": {name: {} for name in "abcd"}, "required": sorted(required)}
    found = build_rules(schema)
    assert found is not None
    grammar = "\n".join((f"start: {found.expression}", *found.rules))
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for chosen in product((False, True), repeat=4):
        names = [name for name, present in zip("abcd", chosen, strict=True) if present]
        text = list(",".join(names).encode())
        matcher.reset()
        accepted = matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()
        assert accepted == (required <= set(names)), names


def test_there_may_be_no_arguments():
    found = build_rules({})
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
def test_an_unsupported_schema_gives_no_rules(schema):
    assert build_rules(schema) is None


def test_a_pair_that_cannot_be_written_gives_no_rules():
    schema = {"properties": {"a": {}, "b": {}}}
    none = build_argument_grammar(schema, "x", separator='","', pair=lambda name, _: None)
    assert none is None


def test_an_extracted_schema_includes_its_definitions():
    root = {"$defs": {"t": {"type": "string"}}, "properties": {}}
    extracted = extract_schema({"$ref": "#/$defs/t"}, root)
    assert extracted is not None
    assert extracted["$defs"] == root["$defs"]
    assert "$defs" not in (extract_schema({"type": "string"}, root) or {})


def test_an_extracted_schema_without_a_type_allows_any_type():
    assert set((extract_schema(True, {}) or {})["type"]) == {
        *("null", "boolean", "number", "string", "array", "object"),
    }


@pytest.mark.parametrize("part", [{"$ref": "#"}, {"items": [{"$ref": "#/properties/a"}]}, False, 3])
def test_a_schema_with_other_references_cannot_be_extracted(part):
    assert extract_schema(part, {}) is None


def test_annotations_are_ignored():
    assert has_only_keywords({"title": "T", "description": "D", "type": "string"}, "type")
    assert not has_only_keywords({"title": "T", "minLength": 1})
