"""Schemas in the engine's words: what says the same, and what must stay."""

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.schema_rewrite import rewrite_schema


def branch(kind: Any, **more: Any) -> dict[str, Any]:
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": {"kind": kind}, "required": ["kind"], **closed, **more}


CAT, DOG = branch({"const": "cat"}), branch({"enum": ["dog", "wolf"]})
DEFINED = {"$defs": {"cat": CAT, "dog": {"$ref": "#/$defs/wolf"}, "wolf": DOG}}

APART = {
    "types": [{"type": "integer"}, {"type": ["string", "null"]}],
    "constants": [{"const": 1}, {"const": "1"}, {"enum": [True, None]}],
    "tags": [CAT, DOG],
    "tags through references": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "a tag that only one requires": [CAT, {**DOG, "required": []}],
}
NOT_APART = {
    "a number may be an integer": [{"type": "integer"}, {"type": "number"}],
    "one value, written twice": [{"const": 1}, {"enum": [1.0, 2]}],
    "no tag is required": [{**CAT, "required": []}, {**DOG, "required": []}],
    "no branch is an object only": [{**CAT, "type": ["object", "null"]}, DOG],
    "a value in common": [CAT, branch({"enum": ["cat", "dog"]})],
    "a branch that says nothing": [CAT, {}],
    "a boolean": [CAT, True],
    "a reference to nowhere": [CAT, {"$ref": "#/$defs/nobody"}],
    "a reference to itself": [CAT, {"$ref": "#/$defs/ring"}],
    "a type that is none": [{"type": "dict"}, {"type": "string"}],
}


@pytest.mark.parametrize("branches", APART.values(), ids=APART)
def test_branches_that_exclude_each_other_are_any_of(branches: list[Any]) -> None:
    rewritten = rewrite_schema({"oneOf": branches, "title": "T", **DEFINED})
    assert rewritten["anyOf"] == branches
    assert "oneOf" not in rewritten


@pytest.mark.parametrize("branches", NOT_APART.values(), ids=NOT_APART)
def test_branches_that_may_both_hold_stay(branches: list[Any]) -> None:
    ring = {"$defs": {**DEFINED["$defs"], "ring": {"$ref": "#/$defs/ring"}}}
    assert rewrite_schema({"oneOf": branches, **ring})["oneOf"] == branches


def test_an_object_of_branches_that_may_both_hold_is_not_closed() -> None:
    """Closed, each would exclude the other, and what satisfies both would be let through."""
    one, other = ({"type": "object", "properties": {name: {}}} for name in "ab")
    assert rewrite_schema({"oneOf": [one, other]})["oneOf"] == [one, other]
    closed = {"additionalProperties": False}
    assert rewrite_schema({"anyOf": [one, other]})["anyOf"] == [one | closed, other | closed]


def test_a_name_that_a_reference_leads_through_stays() -> None:
    schema = {"oneOf": [CAT, DOG], "items": {"$ref": "#/oneOf/0"}}
    assert "oneOf" in rewrite_schema(schema)


def test_beside_an_any_of_it_stays() -> None:
    assert "oneOf" in rewrite_schema({"oneOf": [CAT, DOG], "anyOf": [{}]})


def test_what_forbids_nothing_is_left_out_wherever_it_is() -> None:
    inner = {"uniqueItems": False, "items": {"type": "null", "propertyNames": {}}}
    rewritten = rewrite_schema(
        {"properties": {"a": inner}, "allOf": [inner], "additionalProperties": inner}
    )
    cleaned = {"items": {"type": "null"}}
    assert rewritten["properties"]["a"] == cleaned
    assert rewritten["allOf"] == [cleaned]
    assert rewritten["additionalProperties"] == cleaned


@pytest.mark.parametrize("keyword", [{"uniqueItems": True}, {"uniqueItems": 0}, {"not": {}}])
def test_what_forbids_something_or_is_wrong_stays(keyword: dict[str, Any]) -> None:
    assert keyword.items() <= rewrite_schema(keyword).items()


def test_values_are_left_alone() -> None:
    value = {"uniqueItems": False, "oneOf": [{"const": 1}, {"const": 2}]}
    assert rewrite_schema({"const": value, "enum": [value]})["const"] == value


def test_no_schema_says_how_strictly_it_is_taken() -> None:
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
def test_what_was_rewritten_accepts_what_it_accepted(branches: list[Any], value: Any) -> None:
    schema = {"oneOf": branches}
    rewritten = {key: said for key, said in rewrite_schema(schema).items() if key != "x-guidance"}
    assert jsonschema_rs.is_valid(schema, value) == jsonschema_rs.is_valid(rewritten, value)
