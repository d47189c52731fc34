"""Rewriting of schemas for the engine: equivalent forms, and unchanged schemas."""

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.schema_rewrite import rewrite_schema
from tests.rows import rows


def branch(kind: Any, **more: Any) -> dict[str, Any]:
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": {"kind": kind}, "required": ["kind"], **closed, **more}


CAT, DOG = branch({"const": "cat"}), branch({"enum": ["dog", "wolf"]})
DEFINITIONS = {"$defs": {"cat": CAT, "dog": {"$ref": "#/$defs/wolf"}, "wolf": DOG}}

EXCLUSIVE = {
    "types": [{"type": "integer"}, {"type": ["string", "null"]}],
    "constants": [{"const": 1}, {"const": "1"}, {"enum": [True, None]}],
    "tags": [CAT, DOG],
    "tags through references": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "a tag that only one requires": [CAT, {**DOG, "required": []}],
}
OVERLAPPING = {
    "a number may be an integer": [{"type": "integer"}, {"type": "number"}],
    "one value, written twice": [{"const": 1}, {"enum": [1.0, 2]}],
    "no tag is required": [{**CAT, "required": []}, {**DOG, "required": []}],
    "no branch is an object only": [{**CAT, "type": ["object", "null"]}, DOG],
    "a value in common": [CAT, branch({"enum": ["cat", "dog"]})],
    "an empty branch": [CAT, {}],
    "a boolean": [CAT, True],
    "a dangling reference": [CAT, {"$ref": "#/$defs/missing"}],
    "a reference to itself": [CAT, {"$ref": "#/$defs/ring"}],
    "an unknown type": [{"type": "dict"}, {"type": "string"}],
}


@pytest.mark.parametrize("branches", EXCLUSIVE.values(), ids=EXCLUSIVE)
def test_one_of_with_exclusive_branches_becomes_any_of(branches: list[Any]) -> None:
    rewritten = rewrite_schema({"oneOf": branches, "title": "T", **DEFINITIONS})
    assert rewritten["anyOf"] == branches
    assert "oneOf" not in rewritten


@rows("branches", OVERLAPPING.values(), ids=OVERLAPPING)
def test_one_of_with_overlapping_branches_is_unchanged(branches: list[Any]) -> None:
    circular = {"$defs": {**DEFINITIONS["$defs"], "ring": {"$ref": "#/$defs/ring"}}}
    assert rewrite_schema({"oneOf": branches, **circular})["oneOf"] == branches


def test_objects_in_overlapping_branches_are_not_closed() -> None:
    """If closed, each branch would exclude the other, and values that satisfy both would pass."""
    one, other = ({"type": "object", "properties": {name: {}}} for name in "ab")
    assert rewrite_schema({"oneOf": [one, other]})["oneOf"] == [one, other]
    closed = {"additionalProperties": False}
    assert rewrite_schema({"anyOf": [one, other]})["anyOf"] == [one | closed, other | closed]


def test_an_object_is_closed_if_it_lists_all_required_properties() -> None:
    listed = {"type": "object", "properties": {"a": {}, "b": {}}}
    for required, closed in ((["a"], True), (["a", "b"], True), (["a", "c"], False)):
        rewritten = rewrite_schema({**listed, "required": required})
        assert ("additionalProperties" in rewritten) == closed, required


def test_one_of_is_kept_when_a_reference_goes_through_it() -> None:
    schema = {"oneOf": [CAT, DOG], "items": {"$ref": "#/oneOf/0"}}
    assert "oneOf" in rewrite_schema(schema)


def test_one_of_is_kept_beside_any_of() -> None:
    assert "oneOf" in rewrite_schema({"oneOf": [CAT, DOG], "anyOf": [{}]})


def test_keywords_without_effect_are_removed_at_every_level() -> None:
    inner = {"uniqueItems": False, "items": {"type": "null", "propertyNames": {}}}
    rewritten = rewrite_schema(
        {"properties": {"a": inner}, "allOf": [inner], "additionalProperties": inner}
    )
    cleaned = {"items": {"type": "null"}}
    assert rewritten["properties"]["a"] == cleaned
    assert rewritten["allOf"] == [cleaned]
    assert rewritten["additionalProperties"] == cleaned


@pytest.mark.parametrize("keyword", [{"uniqueItems": True}, {"uniqueItems": 0}, {"not": {}}])
def test_keywords_with_an_effect_and_invalid_ones_are_kept(keyword: dict[str, Any]) -> None:
    assert keyword.items() <= rewrite_schema(keyword).items()


def test_values_are_unchanged() -> None:
    value = {"uniqueItems": False, "oneOf": [{"const": 1}, {"const": 2}]}
    assert rewrite_schema({"const": value, "enum": [value]})["const"] == value


def test_a_schema_cannot_set_leniency() -> None:
    assert rewrite_schema({"x-guidance": {"lenient": True}})["x-guidance"]["lenient"] is False


VALUES = st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from(["a", "b"])
BRANCHES = st.lists(
    st.one_of(
        st.builds(lambda value: {"const": value}, VALUES),
        st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
        st.builds(
            lambda types: {"type": types},
            st.lists(
                st.sampled_from(["integer", "string", "null", "number", "boolean"]),
                min_size=1,
                max_size=2,
                unique=True,
            ),
        ),
        st.builds(lambda value: branch({"const": value}), VALUES),
    ),
    min_size=1,
    max_size=3,
)


@given(BRANCHES, VALUES | st.builds(lambda value: {"kind": value}, VALUES))
def test_a_rewritten_schema_accepts_the_same_values(branches: list[Any], value: Any) -> None:
    schema = {"oneOf": branches}
    rewritten = {key: child for key, child in rewrite_schema(schema).items() if key != "x-guidance"}
    assert jsonschema_rs.is_valid(schema, value) == jsonschema_rs.is_valid(rewritten, value)
